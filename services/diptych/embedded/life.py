"""The thread in which the asyncio side of an engine runs, and all that programs give it to do, up to its end.

Rule: whoever waits is answered. Work that is under way when the end begins is cancelled, and its caller told; what
comes later is refused. One lock stands between work that comes and the end, so none falls in between.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from diptych.common.errors import InternalError

T = TypeVar("T")

CLOSED: Final = "the engine was closed"
FORKED: Final = "the engine is of another process, from which this one was forked: make one here"


class Life:
    """It ends when it is told to, or with the interpreter. Methods are for any thread of its process.

    A process that was forked from this one has no such thread: nothing is done there, and nobody waits.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self.stack = AsyncExitStack()  # what is closed at the end, in the thread
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()  # a garbage collector may come here while its thread holds it
        self._is_over = False
        self._pid = os.getpid()
        self._ending: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.end)  # afterwards its thread stands still, and who waited for it would wait for ever

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have work done. Raises `InternalError`, as the work does, when it has ended."""
        if self._is_elsewhere:
            work.close()
            raise InternalError(FORKED)
        with self._lock:
            if not self._is_over:
                return asyncio.run_coroutine_threadsafe(self._done(work), self._loop)
        work.close()
        raise InternalError(CLOSED)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what came of work. Not for the thread itself. Who is interrupted in this, as by Ctrl-C, cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # does nothing once it is done
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Have work done that others have no use for after the end; wait for it, unless this is the thread itself."""
        with contextlib.suppress(InternalError):
            future = self.submit(work)
            if threading.current_thread() is not self._thread:
                future.result()

    def begin_to_end(self) -> bool:
        """End all work, and then what is on the stack, but wait for nothing; return whether nobody has before."""
        if self._is_elsewhere:
            return False
        with self._lock:
            is_first, self._is_over = not self._is_over, True
            if is_first:
                self._ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        return is_first

    def end(self) -> None:
        """The same, and wait until all has ended, unless this is the thread itself. The first one is told of failures.

        Who is interrupted in this has it go on all the same, and may wait again.
        """
        is_first = self.begin_to_end()
        if self._is_elsewhere or threading.current_thread() is self._thread:
            return
        self._thread.join()
        if is_first:
            self._ending.result()

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is a forked process. Its copy of the lock may be held for ever."""
        return os.getpid() != self._pid

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            atexit.unregister(self.end)

    async def _done(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            raise InternalError(CLOSED) from None
        finally:
            self._tasks.discard(task)

    async def _end(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            try:
                await self.stack.aclose()
            finally:
                await self._loop.shutdown_asyncgens()
        finally:
            self._loop.call_soon(self._loop.stop)  # when this task's end is known
