"""The router's places for requests, and the line before them, as those who wait see it. `queue` decides."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.router.admission.queue import (
    AdmissionLimits,
    AdmissionQueue,
    Admitted,
    Claim,
    Outcome,
    Reason,
    Refused,
)
from diptych.router.errors import Shed

_WORDS: Final = {
    Reason.FULL: "the router is busy with {running} requests, and {waiting} wait",
    Reason.DISPLACED: "the router is busy, and requests of higher priority have come",
    Reason.OVER_SHARE: "the router is busy, and others have come who wait for fewer places than you",
    Reason.TOO_LATE: "the router is busy: the request would wait for longer than it may",
    Reason.SHED: "the router is busy, and requests have come whose SLO tiers come first",
    Reason.EXPIRED: "the router is busy: the request has waited for as long as it may",
}


class Place:
    """One claim's place among the running, or in line."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self._is_held = False
        self._refusal: Overloaded | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return once the place is held. Raises `Overloaded`."""
        if not self._is_held and self._refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.check()

    def check(self) -> None:
        """Raise `Overloaded` if the place is lost."""
        if self._refusal is not None:
            raise self._refusal

    def hold(self) -> None:
        self._is_held = True
        self._wake()

    def lose(self, refusal: Overloaded) -> None:
        self._refusal = refusal
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Admission:
    """Gives places to claims. Use it from one event loop."""

    def __init__(
        self,
        limits: AdmissionLimits,
        on_refusal: Callable[[Reason], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._on_refusal = on_refusal
        self._clock = clock
        self._queue = AdmissionQueue(limits)
        self._places: dict[int, Place] = {}  # oldest first
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return self._queue.num_waiting

    @property
    def num_open(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def oldest_s(self) -> float:
        """How long ago the oldest open request came; 0 when there is none."""
        return self._clock() - next(iter(self._places.values())).begun_s if self._places else 0.0

    async def wait_until_idle(self) -> None:
        """Wait until no request runs or waits."""
        await self._idle.wait()

    def check_count(self, num_requests: int) -> None:
        """Raise `InvalidRequest` for a claim that there is never room for."""
        if num_requests > self._limits.max_running:
            raise InvalidRequest(
                f"this asks for {num_requests} outputs at once; the router makes at most "
                f"{self._limits.max_running}: send fewer prompts in one request, or a smaller n"
            )

    @contextmanager
    def admit(self, claim: Claim) -> Generator[Place, None, None]:
        """Hold a place, or one in line until `wait` returns. Raises `Overloaded` at once when there is neither."""
        self.check_count(claim.num_requests)
        now_s = self._clock()
        number, outcomes = self._queue.offer(claim, now_s)
        self._places[number] = place = Place(now_s)
        self._idle.clear()
        self._perform(outcomes)
        try:
            place.check()
            yield place
        finally:
            self._leave(number)

    def _leave(self, number: int) -> None:
        del self._places[number]
        self._perform(self._queue.leave(number, self._clock()))
        if not self._places:
            self._idle.set()

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            place = self._places[outcome.number]
            if isinstance(outcome, Admitted):
                place.hold()
            else:
                place.lose(self._refusal(outcome))
        self._set_timer()

    def _refusal(self, refused: Refused) -> Overloaded:
        self._on_refusal(refused.reason)
        retry_after_s = max(1, math.ceil(refused.retry_after_s))
        words = _WORDS[refused.reason].format(running=self.num_running, waiting=self.num_waiting)
        error = Shed if refused.reason is Reason.SHED else Overloaded
        return error(f"{words}; try again in {retry_after_s} s", retry_after_s=retry_after_s)

    def _set_timer(self) -> None:
        """While somebody waits, be woken when the first has waited for too long."""
        due_s = self._queue.next_expiry_s if self._queue.num_waiting else None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - self._clock()), self._expire)

    def _expire(self) -> None:
        self._perform(self._queue.expire(self._clock()))
