"""When running requests' next tokens are due, so that each keeps the time per token that its SLO allows. Pure.

Token `i` of an output is due `i` times that time after the first one, wherever the output will end: so the mean is kept
at any end, and a request that is ahead has slack that a step may spend. Requests with the same time per token are a
*group*. A step brings each of them one token, which moves all their deadlines alike: their order stays as it is, and
what a step costs here is a count for each group.

A request with few tokens has no slack yet, and prompts would wait for it to have some. But hardly an output ends with
so few: until it has `borrowed` tokens it may be late, as long as steps without prompts still bring it that many in
time. Of such *young* requests the one that came first is due first: those behind it got fewer tokens in less time.

Prompts may also delay outputs knowingly (`StepPace`): `lost` tells how many then end late, by how long outputs become
and how fast they catch up. Who is late by more than `FORGIVEN` tokens, and won't catch up, can't be mended by hurrying:
its deadlines are counted anew, and nobody loses by delaying it further. A time per token that steps without any prompt
don't keep by far binds nobody: prompts would wait for nothing.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import F64
from diptych.engine.schedule.kv_forecast import FIRST_GUESS, OutputLengths
from diptych.engine.values.request import Request

KEPT_BACK: Final = 0.01  # of each token's time, for what happens outside: hand-offs, the way to the client
PER_OCTAVE: Final = 128  # groups: times that differ by less than 0.6 % are the same, the shorter one
SPARED: Final = 0.02  # of a time per token: where steps leave so much, outputs gain it, whatever prompts took of late
FORGIVEN: Final = 8  # tokens
MAX_BORROWED: Final = 128  # tokens
LOST: Final = 1.25  # times a time per token that steps without prompts take, who don't keep it by far
CATCH_UP: Final = 1.1  # steps that bring young requests their tokens may each take so much longer than expected
MIN_TPOT_S: Final = 1e-6
LEAST_GAIN_S: Final = 1e-9  # of a token

_Entry = tuple[float, int, int]  # the base of its deadlines, a number for order, its room
_Begun = tuple[float, int]  # when a request had its first token, and the number of the group's steps before its second


class _Made(NamedTuple):
    """How far an output has come."""

    offset: int  # it has as many tokens as its group has had steps, less so many
    most: int  # tokens that it may have
    weight: float


@dataclass(slots=True)
class _Group:
    """Requests with one time per token. A request's next token is due at its base and `num_steps` times that time."""

    tpot_s: float
    num_steps: int = 0
    young: dict[int, _Begun] = field(default_factory=dict)  # by room, in the order in which they came
    bases: dict[int, float] = field(default_factory=dict)  # of the others, by room
    heap: list[_Entry] = field(default_factory=list)  # of these, and of some that have left, until they come up
    num_pushed: int = 0
    made: dict[int, _Made] = field(default_factory=dict)  # by room
    given_up: set[int] = field(default_factory=set)  # rooms of outputs whose deadlines are counted anew
    kept: F64 | None = None  # `[4, n]` of the others: base, offset, most, weight; None: something has changed

    def begin(self, room: int, first_s: float, num_launched: int, *, is_young: bool) -> None:
        """A request had its first token, and has so many in steps that are launched."""
        self.kept = None
        begun = (first_s, self.num_steps - num_launched)
        if is_young:
            self.young[room] = begun
        else:
            self.push(room, self._base_s(begun))

    def due_s(self, now_s: float, step_s: float, borrowed: int) -> float:
        """Return when the first token is due that a step brings, while steps without prompts take `step_s`."""
        self._grow_up(borrowed)
        return min(self._grown_due_s(now_s, step_s), self._young_due_s(step_s, borrowed))

    def ahead(self, room: int, num_tokens: int) -> None:
        self.kept = None
        if room in self.young:
            first_s, num_steps = self.young[room]
            self.young[room] = first_s, num_steps - num_tokens
        else:
            self.push(room, self.bases[room] + num_tokens * self.tpot_s)
        made = self.made[room]
        self.made[room] = made._replace(offset=made.offset - num_tokens)

    def remove(self, room: int) -> None:
        self.kept = None
        if self.young.pop(room, None) is None:
            del self.bases[room]
        self.given_up.discard(room)
        del self.made[room]

    def push(self, room: int, base_s: float) -> None:
        self.kept = None
        self.num_pushed += 1
        self.bases[room] = base_s
        heapq.heappush(self.heap, (base_s, self.num_pushed, room))
        if len(self.heap) > 2 * len(self.bases) + PER_OCTAVE:
            self.heap = [entry for entry in self.heap if self.bases.get(entry[2]) == entry[0]]
            heapq.heapify(self.heap)

    def _grow_up(self, borrowed: int) -> None:
        while self.young:
            room, begun = next(iter(self.young.items()))
            if self.num_steps - begun[1] < borrowed:
                return
            del self.young[room]
            self.push(room, self._base_s(begun))

    def _young_due_s(self, step_s: float, borrowed: int) -> float:
        if not self.young:
            return math.inf
        first_s, num_steps = next(iter(self.young.values()))
        num_left = borrowed - 1 - (self.num_steps - num_steps)  # behind the next one
        return first_s + borrowed * self.tpot_s - num_left * min(self.tpot_s, CATCH_UP * step_s)

    def at_stake(self) -> F64:
        """Return of outputs that may keep their time when the next token is due, that time, tokens, most, weight."""
        if self.kept is None:
            self.kept = self._kept()
        base_s, offset, most, weight = self.kept
        due_s, made = base_s + self.num_steps * self.tpot_s, self.num_steps - offset
        return np.stack((due_s, np.full_like(base_s, self.tpot_s), made, most, weight))

    def _kept(self) -> F64:
        bases = [(room, base_s) for room, base_s in self.bases.items() if room not in self.given_up]
        bases += ((room, self._base_s(begun)) for room, begun in self.young.items())
        return np.array([(base_s, *self.made[room]) for room, base_s in bases], np.float64).reshape(-1, 4).T

    def _grown_due_s(self, now_s: float, step_s: float) -> float:
        while self.bases:
            base_s, _, room = self.heap[0]
            due_s = base_s + self.num_steps * self.tpot_s
            if self.bases.get(room) != base_s:
                heapq.heappop(self.heap)
            elif due_s < now_s - FORGIVEN * self.tpot_s and not self._catches_up(room, now_s - due_s, step_s):
                self.given_up.add(room)
                self.push(room, self._base_s((now_s, self.num_steps)))
            else:
                return due_s
        return math.inf

    def _catches_up(self, room: int, late_s: float, step_s: float) -> bool:
        """Whether steps without prompts bring it so many tokens in time that it is not late any more, probably."""
        made, num_tokens = self.made[room], self.num_steps - self.made[room].offset
        wanted = late_s / max(LEAST_GAIN_S, self.tpot_s - step_s)
        return wanted < min(max(num_tokens, FIRST_GUESS), made.most - num_tokens)

    def _base_s(self, begun: _Begun) -> float:
        first_s, num_steps = begun
        return first_s + (1 - num_steps) * self.tpot_s


class TokenDeadlines:
    """Knows the deadlines of the requests that run. Those without a time per token are only counted."""

    def __init__(self) -> None:
        self._lengths = OutputLengths()
        self._groups: dict[float, _Group] = {}  # by time per token
        self._group_of: dict[int, _Group] = {}  # by room
        self._free: set[int] = set()  # rooms of requests without one

    def __len__(self) -> int:
        return len(self._group_of) + len(self._free)

    @property
    def has_any(self) -> bool:
        """Whether any request runs."""
        return bool(self._group_of or self._free)

    @property
    def has_due(self) -> bool:
        """Whether any of the requests has a time per token."""
        return bool(self._groups)

    @property
    def num_free(self) -> int:
        """How many of the requests have no time per token."""
        return len(self._free)

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
        offset, most = group.num_steps - request.num_output_tokens, request.max_len - request.prompt_len
        group.made[request.room] = _Made(offset, most, request.slo.weight)
        group.begin(request.room, first_s, 0, is_young=self._is_young(request))

    def correct(self, request: Request, first_s: float, num_launched: int) -> None:
        """The first token of a request, if it is here, came at `first_s`; so many steps are launched behind it."""
        group = self._group_of.get(request.room)
        if group is not None:
            made = group.made[request.room]
            group.remove(request.room)
            group.made[request.room] = made
            group.begin(request.room, first_s, num_launched, is_young=self._is_young(request))

    def remove(self, request: Request) -> None:
        """Take out a request, if it is here."""
        self._free.discard(request.room)
        group = self._group_of.pop(request.room, None)
        if group is not None:
            group.remove(request.room)
            if not (group.bases or group.young):
                del self._groups[group.tpot_s]

    def stepped(self, num_steps: int) -> None:
        """A step is launched that brings each request a token; -1: it was given up."""
        for group in self._groups.values():
            group.num_steps += num_steps

    def ahead(self, request: Request, num_tokens: int) -> None:
        """A request got so many tokens more than the one that a step brings."""
        group = self._group_of.get(request.room)
        if group is not None:
            group.ahead(request.room, num_tokens)

    def next_due_s(self, now_s: float, step_s: float) -> float:
        """Return when the first of the tokens is due that a step brings which begins at `now_s`; infinite: never.

        `step_s`: of a step without prompts.
        """
        if not self._groups:
            return math.inf
        kept, borrowed = (group for group in self._groups.values() if LOST * group.tpot_s > step_s), self.borrowed
        return min((group.due_s(now_s, step_s, borrowed) for group in kept), default=math.inf)

    @property
    def borrowed(self) -> int:
        """Tokens that an output has at least, as a rule; 1: nobody knows."""
        return max(1, min(MAX_BORROWED, self._lengths.short))

    @property
    def tightest_s(self) -> float:
        """The smallest time per token."""
        return min(self._groups, default=math.inf)

    def expect(self, lengths: OutputLengths) -> None:
        """Outputs have become so long; more of them are observed."""
        self._lengths = lengths

    def lost(self, begin_s: float, work_s: float, tokens_s: float, pace_s: float) -> float:
        """Return how many outputs more will probably end late, by their weights, if they wait for `work_s`.

        `begin_s`: when they would have their next tokens without that. Tokens take `pace_s` behind it, with prompts as
        of late, and `tokens_s` without any.
        """
        groups = [group.at_stake() for group in self._groups.values()]
        if not groups:
            return 0.0
        due_s, tpot_s, made, most, weight = groups[0] if len(groups) == 1 else np.concatenate(groups, axis=1)
        if not len(due_s):
            return 0.0
        gain_s = np.minimum(tpot_s - tokens_s, np.maximum(tpot_s - pace_s, SPARED * tpot_s))  # of each token
        slack_s = due_s - begin_s
        delayed, undelayed = self._late(np.stack((slack_s - work_s, slack_s)), gain_s, made, most)
        return float((delayed - undelayed) @ weight)

    def _late(self, slack_s: F64, gain_s: F64, made: F64, most: F64) -> F64:
        """Return how likely outputs end late that have so much slack, `[cases, n]`, and gain so much by each token."""
        num_tokens = np.abs(slack_s) / np.maximum(np.abs(gain_s), LEAST_GAIN_S)
        ends = self._lengths.ends_within(made, num_tokens, most)
        is_late, grows = slack_s < 0, gain_s > 0
        return np.where(grows, np.where(is_late, ends, 0.0), np.where(is_late, 1.0, 1 - ends))

    def _is_young(self, request: Request) -> bool:
        return request.max_len - request.num_tokens >= self.borrowed > 1


def grouped(tpot_s: float) -> float:
    """Return the time per token that a request is held to, which has `tpot_s`: no more than 2.1 % less."""
    octaves = math.log2(max(MIN_TPOT_S, tpot_s * (1 - KEPT_BACK)))
    return float(2 ** (math.floor(octaves * PER_OCTAVE) / PER_OCTAVE))
