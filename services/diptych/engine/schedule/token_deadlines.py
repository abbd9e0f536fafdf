"""When running requests' next tokens are due, so that each keeps the time per token that its SLO allows. Pure.

Token `i` of an output is due `i` times that time after the first one, wherever the output will end: so the mean is kept
at any end, and a request that is ahead has slack that a step may spend. Requests with the same time per token are a
*group*. A step brings each of them one token, which moves all their deadlines alike: their order stays as it is, and
what a step costs here is a count for each group.

Who is late by more than `FORGIVEN` tokens can't be mended by hurrying: its deadlines are counted anew. A time per token
that steps without any prompt don't keep binds nobody: prompts would wait for nothing.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Final

from diptych.engine.values.request import Request

KEPT_BACK: Final = 0.01  # of each token's time, for what happens outside: hand-offs, the way to the client
PER_OCTAVE: Final = 64  # groups: times that differ by less than 1 % are the same, the shorter one
FORGIVEN: Final = 8  # tokens
MIN_TPOT_S: Final = 1e-6

_Entry = tuple[float, int, int]  # the base of its deadlines, a number for order, its room


@dataclass(slots=True)
class _Group:
    """Requests with one time per token. A request's next token is due at its base and `num_steps` times that time."""

    tpot_s: float
    num_steps: int = 0
    bases: dict[int, float] = field(default_factory=dict)  # by room
    heap: list[_Entry] = field(default_factory=list)  # and those that have left, until they come up

    def first(self) -> _Entry:
        """Return who is due first; there is somebody."""
        while self.bases.get(self.heap[0][2]) != self.heap[0][0]:
            heapq.heappop(self.heap)
        return self.heap[0]

    def due_s(self, entry: _Entry) -> float:
        return entry[0] + self.num_steps * self.tpot_s


class TokenDeadlines:
    """Of the requests that run. Those without a time per token are only counted."""

    def __init__(self) -> None:
        self._groups: dict[float, _Group] = {}  # by time per token
        self._group_of: dict[int, _Group] = {}  # by room
        self._free: set[int] = set()  # rooms of requests without one
        self._num_added = 0

    @property
    def num_free(self) -> int:
        """How many of the requests have no time per token."""
        return len(self._free)

    @property
    def are_any(self) -> bool:
        """Whether any of them has one."""
        return bool(self._groups)

    def add(self, request: Request, first_s: float) -> None:
        """Take in a request that has its first token at `first_s`; no step that is launched brings it another."""
        if request.slo.tpot_s <= 0:
            self._free.add(request.room)
            return
        tpot_s = grouped(request.slo.tpot_s)
        group = self._groups.get(tpot_s)
        if group is None:
            group = self._groups[tpot_s] = _Group(tpot_s)
        self._group_of[request.room] = group
        self._begin(group, request.room, first_s, 0)

    def correct(self, request: Request, first_s: float, num_launched: int) -> None:
        """The first token of a request, if it is here, came at `first_s`; so many steps are launched behind it."""
        group = self._group_of.get(request.room)
        if group is not None:
            self._begin(group, request.room, first_s, num_launched)

    def remove(self, request: Request) -> None:
        """Take out a request, if it is here."""
        self._free.discard(request.room)
        group = self._group_of.pop(request.room, None)
        if group is not None:
            del group.bases[request.room]
            if not group.bases:
                del self._groups[group.tpot_s]

    def stepped(self, num_steps: int) -> None:
        """A step is launched that brings each request a token; -1: it was given up."""
        for group in self._groups.values():
            group.num_steps += num_steps

    def ahead(self, request: Request, num_tokens: int) -> None:
        """A request got so many tokens more than the one that a step brings."""
        group = self._group_of.get(request.room)
        if group is not None:
            self._push(group, request.room, group.bases[request.room] + num_tokens * group.tpot_s)

    def next_due_s(self, now_s: float, step_s: float) -> float:
        """Return when the first of the tokens is due that a step brings which begins at `now_s`; infinite: never.

        `step_s`: of a step without prompts.
        """
        return min((self._due_s(g, now_s) for g in self._groups.values() if g.tpot_s > step_s), default=math.inf)

    def _due_s(self, group: _Group, now_s: float) -> float:
        entry = group.first()
        while group.due_s(entry) < now_s - FORGIVEN * group.tpot_s:
            self._push(group, entry[2], now_s - (group.num_steps - 1) * group.tpot_s)
            entry = group.first()
        return group.due_s(entry)

    def _begin(self, group: _Group, room: int, first_s: float, num_launched: int) -> None:
        self._push(group, room, first_s + (1 + num_launched - group.num_steps) * group.tpot_s)

    def _push(self, group: _Group, room: int, base_s: float) -> None:
        self._num_added += 1
        group.bases[room] = base_s
        heapq.heappush(group.heap, (base_s, self._num_added, room))
        if len(group.heap) > 2 * len(group.bases) + PER_OCTAVE:
            group.heap = [entry for entry in group.heap if group.bases.get(entry[2]) == entry[0]]
            heapq.heapify(group.heap)


def grouped(tpot_s: float) -> float:
    """Return the time per token that a request is held to, which has `tpot_s`: no more than 2.1 % less."""
    octaves = math.log2(max(MIN_TPOT_S, tpot_s * (1 - KEPT_BACK)))
    return float(2 ** (math.floor(octaves * PER_OCTAVE) / PER_OCTAVE))
