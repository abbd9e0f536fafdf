"""Keeps the books of one frontend over several scheduler groups: who computes which room, and who lives.

Rule: a room belongs to one group from `start` to its last output, or until the group is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.engine.embedded.dispatch.policy import DispatchPolicy, GroupView, RequestView


@dataclass(slots=True)
class _Group:
    open: set[int] = field(default_factory=set)  # rooms
    unanswered: dict[int, int] = field(default_factory=dict)  # room -> prompt tokens

    def view(self, rank: int) -> GroupView:
        return GroupView(rank, len(self.open), sum(self.unanswered.values()))


class Dispatcher:
    """Applies a policy to the living groups."""

    def __init__(self, num_groups: int, policy: DispatchPolicy) -> None:
        self._policy = policy
        self._groups = {rank: _Group() for rank in range(num_groups)}
        self._rank_of: dict[int, int] = {}

    @property
    def ranks(self) -> Sequence[int]:
        """The living groups."""
        return tuple(self._groups)

    def rank_of(self, room: int) -> int | None:
        """Return the group that has an open room."""
        return self._rank_of.get(room)

    def start(self, room: int, request: RequestView) -> int:
        """Choose the group for a new room. At least one group must live."""
        assert room not in self._rank_of, "a room is used once"
        views = [group.view(rank) for rank, group in self._groups.items()]
        rank = views[0].rank if len(views) == 1 else self._policy.choose(views, request)
        self._rank_of[room] = rank
        self._groups[rank].open.add(room)
        self._groups[rank].unanswered[room] = len(request.prompt)
        return rank

    def answered(self, room: int, *, is_last: bool) -> None:
        """Note an output. One of a room that has ended changes nothing."""
        rank = self._rank_of.get(room)
        if rank is None:
            return
        self._groups[rank].unanswered.pop(room, None)
        if is_last:
            self._groups[rank].open.remove(room)
            del self._rank_of[room]

    def lose(self, rank: int) -> list[int]:
        """A group died: return its open rooms, which nobody computes any more."""
        rooms = sorted(self._groups.pop(rank).open)
        for room in rooms:
            del self._rank_of[room]
        return rooms
