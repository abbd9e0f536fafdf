"""An event loop whose time passes at once."""

from __future__ import annotations

import asyncio
import selectors


class TimeThatPasses(selectors.SelectSelector):
    """Waits for nothing: the loop's clock goes on by as much."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0
        return super().select(0)


class FastLoop(asyncio.SelectorEventLoop):
    """Comes at once to what is due later."""

    def __init__(self) -> None:
        self._clock = TimeThatPasses()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s
