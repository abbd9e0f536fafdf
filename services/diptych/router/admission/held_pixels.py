"""What the images of one request, or its rows, take of the memory for these. Pure."""

from __future__ import annotations

from diptych.router.admission.body_budget import BodyBudget


class HeldPixels:
    """Bytes of files and pixels, or of rows, of one request. Leave it when the request has ended."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._num_bytes = 0

    def charge(self, num_bytes: int) -> None:
        """Raises `RateLimited` or `Overloaded`."""
        self._budget.charge(self._caller, num_bytes)
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """They are not held any more."""
        self._budget.refund(self._caller, num_bytes)
        self._num_bytes -= num_bytes

    def __enter__(self) -> HeldPixels:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.refund(self._caller, self._num_bytes)
        self._num_bytes = 0
