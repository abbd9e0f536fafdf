"""The groups take turns. Looks at no load."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.embedded.dispatch.policy import GroupView, RequestView


class RoundRobin:
    """Implements `DispatchPolicy`."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, groups: Sequence[GroupView], request: RequestView) -> int:
        self._last = next((group.rank for group in groups if group.rank > self._last), groups[0].rank)
        return self._last
