"""Gives a step up, between two layers, once nobody wants what it computes.

The loop hears nothing while a step runs, and one behind a long context may run for long. Short steps never look: they
pay for a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from diptych.engine.values.batch import OnLayer

LOOK_S: Final = 0.03  # between two looks


class StepGivenUp(Exception):
    """The step was not run to its end, and never will be."""


class StepWatch:
    """Listens to the layers of the steps that it is put over, in the thread that does so."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_wanted: Callable[[], bool] | None = None
        self._thread = 0
        self._looked_s = 0.0

    @contextmanager
    def over(self, is_wanted: Callable[[], bool]) -> Generator[None, None, None]:
        """Have the step that runs inside raise `StepGivenUp` soon after `is_wanted()` has become false."""
        self._is_wanted, self._thread, self._looked_s = is_wanted, threading.get_ident(), self._clock()
        try:
            yield
        finally:
            self._is_wanted = None

    def listener(self) -> OnLayer | None:
        """Return who is to hear of each layer of the next step; None when nobody watches."""
        return self._look if self._is_wanted is not None and self._thread == threading.get_ident() else None

    def _look(self, layer: int) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if self._is_wanted is not None and not self._is_wanted():
            raise StepGivenUp
