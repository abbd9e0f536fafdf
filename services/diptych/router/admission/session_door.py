"""Where clients wait for their sessions to be let in, and what becomes of these. `session_line` decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from diptych.common.errors import Unavailable
from diptych.router.admission.session_line import TICKET_S, Key, SessionLine

LOOK_S: Final = 1.0  # between looks at the pools, and at who is gone, while anybody waits
RETRY_S: Final = 5  # after which a client that stopped waiting is told to ask again


class SessionDoor:
    """The line of one router process. It is the event loop's alone."""

    def __init__(
        self, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic, look_s: float = LOOK_S
    ) -> None:
        """`capacity`: tokens of context that this router's sessions may have together, now."""
        self.line = SessionLine()
        self._capacity = capacity
        self._clock = clock
        self._look_s = look_s
        self._waiters: dict[Key, set[asyncio.Future[None]]] = {}
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
        return sum(map(len, self._waiters.values()))

    async def wait(self, key: Key, expected_tokens: int, wait_s: float) -> bool:
        """Return True once the session is in. Raises `Unavailable` after `wait_s`, and `Overloaded` at once."""
        self._check_open()
        begun_s = self._clock()
        self.line.ask(key, expected_tokens, begun_s)
        try:
            self.look()
            if not self.line.is_in(key):
                await self._wake(key, wait_s)
        finally:
            self.waited_s += self._clock() - begun_s
            self.line.let_go(key, self._clock())
        self._check_open()
        if not self.line.is_in(key):
            self.num_given_up += 1
            raise Unavailable(self._words(key), retry_after_s=RETRY_S)
        return True

    def claim(self, key: Key, idle_s: float) -> None:
        """A session that is in begins."""
        self.line.claim(key, idle_s, self._clock())

    def close(self, key: Key) -> bool:
        """Return whether the session was in, or waited; who waits for it is told."""
        was_there = self.line.close(key)
        self._answer(key)
        self.look()
        return was_there

    @contextmanager
    def request(self, key: Key) -> Generator[ContextOfRequest, None, None]:
        """Hold a session while a request of it runs; one that did not wait here has no part in this."""
        context = ContextOfRequest()
        if not self.line.is_in(key):
            yield context
            return
        self.line.begin(key, self._clock())
        try:
            yield context
        finally:
            self.line.end(key, context.num_tokens, self._clock())
            self.look()

    def look(self) -> None:
        """Let in whom there is room for; look again later as long as anybody waits."""
        if not self.line.num_waiting:
            return
        for key in self.line.admit(self._capacity(), self._clock()):
            self.num_admitted += 1
            self._answer(key)
        if self._timer is None and self.line.num_waiting and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look_again)

    def leave(self) -> None:
        """Let nobody wait here any more: the router leaves."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for key in list(self._waiters):
            self._answer(key)

    def _look_again(self) -> None:
        self._timer = None
        self.look()

    async def _wake(self, key: Key, wait_s: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, set()).add(waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._forget(key, waiter)

    def _forget(self, key: Key, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(key, set())
        waiters.discard(waiter)
        if not waiters:
            self._waiters.pop(key, None)

    def _answer(self, key: Key) -> None:
        for waiter in self._waiters.pop(key, set()):
            if not waiter.done():
                waiter.set_result(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("this router leaves: open the session at another one", retry_after_s=1)

    def _words(self, key: Key) -> str:
        place = self.line.place(key)
        if not place:
            return "the session was closed while it waited"
        kept = f"ask again within {TICKET_S:.0f} s with session_id {key.session_id!r}, and it keeps this place"
        return f"the KV pools are full of other sessions' contexts: this one is number {place} in line; {kept}"


class ContextOfRequest:
    """What a request of a session had of context when it ended."""

    def __init__(self) -> None:
        self.num_tokens = 0  # 0: nobody knows
