"""Where clients wait for their sessions to be let in, and what becomes of these. `session_line` decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from diptych.common.errors import Conflict, DiptychError, Unavailable
from diptych.router.admission.session_line import TICKET_S, Key, SessionLine

LOOK_S: Final = 1.0  # between looks at the pools, and at who is gone, while anybody waits
SOON_S: Final = 0.01  # in which all that ends is looked at once: a look goes through the whole line
LEFT: Final = "this router leaves: open the session at another one"
RETRY_S: Final = 5  # after which a client that stopped waiting is told to ask again


class SessionDoor:
    """The line of a router for one model. It is the event loop's alone."""

    def __init__(
        self,
        capacity: Callable[[], int],
        problem: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
    ) -> None:
        """`capacity`: tokens of context that this router's sessions may have together, now; `problem`: why none."""
        self.line = SessionLine()
        self._capacity = capacity
        self._problem = problem
        self._clock = clock
        self._look_s = look_s
        self._waiters: dict[Key, asyncio.Future[DiptychError | None]] = {}  # one call each
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.num_admitted = 0
        self.num_given_up = 0  # calls that were told to come back
        self.waited_s = 0.0  # of all calls

    @property
    def capacity_tokens(self) -> int:
        return self._capacity()

    @property
    def num_calls(self) -> int:
        """Calls that wait now."""
        return len(self._waiters)

    async def wait(self, key: Key, expected_tokens: int, wait_s: float) -> bool:
        """Return True once the session is in. Raises `Unavailable` after `wait_s`, and `Overloaded` at once.

        Raises `Conflict` if the session is closed meanwhile, or another call comes to wait for it: the latest one does.
        """
        self._check_open()
        begun_s = self._clock()
        member = self.line.ask(key, expected_tokens, begun_s)
        try:
            self.look()
            refusal = None if self.line.is_in(key) else await self._wake(key, wait_s)
        finally:
            self.waited_s += self._clock() - begun_s
            self.line.let_go(key, member, self._clock())
        if refusal is not None:
            raise refusal
        if not self.line.is_in(key):
            if not self.line.place(key):  # it was let in, or its time was up, in the same moment
                raise _closed()
            self.num_given_up += 1
            raise Unavailable(self._words(key), retry_after_s=RETRY_S)
        return True

    def claim(self, key: Key, idle_s: float) -> None:
        """A session that is in begins."""
        self.line.claim(key, idle_s, self._clock())

    def release(self, key: Key) -> None:
        """A session that was let in could not begin: unless another call has had it begin, its room is free."""
        if self.line.release(key):
            self._look_within(SOON_S)

    def close(self, key: Key) -> bool:
        """Return whether the session was in, or waited; who waits for it is told."""
        was_there = self.line.close(key)
        self._answer(key, _closed())
        if was_there:
            self._look_within(SOON_S)
        return was_there

    @contextmanager
    def request(self, key: Key) -> Generator[ContextOfRequest, None, None]:
        """Hold a session while a request of it runs; one that did not wait here has no part in this."""
        context = ContextOfRequest()
        member = self.line.begin(key, self._clock())
        try:
            yield context
        finally:
            if member is not None:
                self.line.end(member, context.num_tokens, self._clock())
                self._look_within(SOON_S)

    def look(self) -> None:
        """End what nobody uses, and let in whom there is room for; look again later as long as anybody waits."""
        for key in self.line.admit(self._capacity(), self._clock()):
            self.num_admitted += 1
            self._answer(key, None)
        self._look_within(self._look_s)

    def expire(self) -> None:
        """End what nobody uses: only looks do so by themselves, and there are none while nobody waits."""
        self.line.expire(self._clock())

    def leave(self) -> None:
        """Let nobody wait here any more: the router leaves."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for key in list(self._waiters):
            self._answer(key, self._left())

    def _look_within(self, seconds: float) -> None:
        """Look again so soon, if anybody waits, unless that is to be before."""
        if self._is_closed or not self.line.num_waiting:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()

    async def _wake(self, key: Key, wait_s: float) -> DiptychError | None:
        """Wait until the session is in, or for so long. Return what the call is told instead."""
        self._answer(key, Conflict(f"another call waits for the session {key.session_id!r} now, in place of this one"))
        waiter: asyncio.Future[DiptychError | None] = asyncio.get_running_loop().create_future()
        self._waiters[key] = waiter
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]

    def _answer(self, key: Key, refusal: DiptychError | None) -> None:
        waiter = self._waiters.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(refusal)

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._left()

    def _left(self) -> Unavailable:
        return Unavailable(LEFT, retry_after_s=1)

    def _words(self, key: Key) -> str:
        why = "the KV pools are full of other sessions' contexts"
        if not self._capacity():
            why = self._problem() or "no worker has told how large its KV pool is"
        kept = f"ask again within {TICKET_S:.0f} s with session_id {key.session_id!r}, and it keeps this place"
        return f"{why}: this one is number {self.line.place(key)} in line; {kept}"


def _closed() -> Conflict:
    return Conflict("the session was closed while it waited")


class ContextOfRequest:
    """What a request of a session had of context when it ended."""

    def __init__(self) -> None:
        self.num_tokens = 0  # 0: nobody knows
