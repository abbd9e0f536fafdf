"""Threads for long work that tenants share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from diptych.router.admission.fair_queue import ONLY_RANK, FairQueue, Waiting

T = TypeVar("T")


class FairThreadPool:
    """A few threads for long work of one event loop, which tenants share: whose turn it is says a `FairQueue`.

    Turns go by the steps of the work. So the long work of one tenant waits behind its own and, at most, a piece of
    another's. Work that nobody waits for any more leaves the line.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._line = FairQueue()
        self._turns: dict[int, asyncio.Future[None]] = {}  # by the number of who waits in line
        self._next_number = 0

    @property
    def num_waiting(self) -> int:
        return len(self._turns)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], tenant: str, num_steps: int) -> T:
        """Return what `work`, of so many steps, does in a thread when it is its turn."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(tenant, num_steps)
        running = self._threads.submit(work)
        running.add_done_callback(partial(self._end, asyncio.get_running_loop()))
        return await asyncio.wrap_future(running)

    async def _turn(self, tenant: str, num_steps: int) -> None:
        """Wait in line for the thread of somebody who is done."""
        claim = Waiting(self._next_number, tenant, ONLY_RANK, num_steps, math.inf)
        self._next_number += 1
        self._line.add(claim)
        turn = self._turns[claim.number] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._pass_on()
            elif self._turns.pop(claim.number, None):
                self._line.remove(claim)
            raise

    def _end(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        """In the thread: whoever waited for the work may have left."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        """Give a thread that is free to who is next."""
        while self._turns:
            claim = self._line.next()
            turn = self._turns.pop(claim.number)
            if turn.done():  # who waited has just left
                self._line.remove(claim)
                continue
            self._line.charge(claim)
            self._line.remove(claim)
            turn.set_result(None)
            return
        self._num_free += 1
