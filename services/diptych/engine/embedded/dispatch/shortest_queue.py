"""Chooses the group with the fewest prompt tokens to compute, then the one with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.embedded.dispatch.policy import GroupView, RequestView


class ShortestQueue:
    """Implements `DispatchPolicy`."""

    def choose(self, groups: Sequence[GroupView], request: RequestView) -> int:
        return min(groups, key=lambda group: (group.waiting_tokens, group.num_open, group.rank)).rank
