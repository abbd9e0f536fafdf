"""How many bytes the bodies of requests may take together, and those of one caller. Pure.

Rule: a body counts from the moment its bytes come until its request has ended, as its prompt is kept as long. Small
ones do not: as many as there may be requests at once take less than a few large ones. Where callers have names, of
their keys, one may hold a quarter of all, so that others find room.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from diptych.common.errors import Overloaded
from diptych.router.errors import RateLimited

SMALL_BYTES: Final = 2**16
SHARE: Final = 4  # one caller may hold one part in so many
RETRY_AFTER_S: Final = 1


class BodyBudget:
    """What is left of `max_bytes`."""

    def __init__(self, max_bytes: int, what: str = "bodies") -> None:
        self._max_bytes = max_bytes
        self._what = what  # it is that takes them, in words
        self._held: Counter[str] = Counter()  # by caller; only who holds something
        self.num_bytes = 0

    @property
    def share(self) -> int:
        """Bytes that one caller may hold."""
        return self._max_bytes // SHARE

    def hold(self, caller: str) -> HeldBody:
        """Return what one body takes, which is nothing yet. `caller`: empty for whoever has no name."""
        return HeldBody(self, caller)

    def charge(self, caller: str, num_bytes: int) -> None:
        """Raises `RateLimited` if it is too much for one caller, `Overloaded` if it is for all."""
        share = self.share
        if caller and self._held[caller] + num_bytes > share:
            self._forget_empty(caller)
            words = (
                f"the {self._what} of the requests of the key {caller!r} would take more than {share} bytes together"
            )
            raise RateLimited(f"{words}: wait until some have ended", retry_after_s=RETRY_AFTER_S)
        if self.num_bytes + num_bytes > self._max_bytes:
            words = f"the {self._what} of all requests would take more than {self._max_bytes} bytes together"
            raise Overloaded(f"{words}: try again when some have ended", retry_after_s=RETRY_AFTER_S)
        self._held[caller] += num_bytes
        self.num_bytes += num_bytes

    def refund(self, caller: str, num_bytes: int) -> None:
        self._held[caller] -= num_bytes
        self.num_bytes -= num_bytes
        self._forget_empty(caller)

    def _forget_empty(self, caller: str) -> None:
        if not self._held[caller]:
            del self._held[caller]


class HeldBody:
    """What one body takes of a budget. `release` it."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """The body has so many bytes now. Raises `Overloaded`."""
        if num_bytes > SMALL_BYTES:
            self._budget.charge(self._caller, num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def release(self) -> None:
        """Its request has ended; a second time it changes nothing."""
        if self._num_bytes:
            self._budget.refund(self._caller, self._num_bytes)
            self._num_bytes = 0
