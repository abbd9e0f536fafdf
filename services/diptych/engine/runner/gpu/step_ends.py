"""When the device was done with a step that the host asked for later, by the device's own clock.

While a step runs the host launches the next one. Kernel by kernel that takes up to 20 ms for a prompt, and the step
may end meanwhile: whoever asks then would take the launch for a part of it, and learn that steps of outputs are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol, Self

REACH_S: Final = 2.0  # in which the clocks of host and device drift by less than 100 us


class End(Protocol):
    """The end of a step, as a `torch.cuda.Event` with timing."""

    def query(self) -> bool:
        """Whether the device has come so far."""
        ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Return the milliseconds from this to a later one."""
        ...


class StepEnds:
    """Waits for ends of steps, in their order. An end that was waited for tells when the later ones were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: tuple[End, float] | None = None  # an end, and when it was on the host's clock

    def wait(self, end: End) -> float:
        """Return how many seconds before now the device came to the end; 0 also where that is not known."""
        if end.query():
            return self._late_s(end)
        end.synchronize()
        self._known = end, self._clock()
        return 0.0

    def _late_s(self, end: End) -> float:
        if self._known is None:
            return 0.0
        known, known_s = self._known
        since_s = self._clock() - known_s
        return max(0.0, since_s - known.elapsed_time(end) / 1e3) if since_s <= REACH_S else 0.0
