"""The tests of a link in each direction in which pages may flow over it, one direction after the other.

When a link comes up each end says in which directions pages may go at it: its own word counts, for what others know of
it may be old. Where they may go in both, the end with the lower instance id tests first. The end that tests last knows
first that the link is good, so whatever it sends then arrives after that news: no end hears of rooms before its link is
up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from diptych.kvtransfer.probe.actions import (
    Action,
    Digest,
    Done,
    Failed,
    FillProbe,
    Measure,
    Passed,
    SendProbeNote,
    UsePath,
    Write,
)
from diptych.kvtransfer.probe.notes import Directions, ProbeAsk, ProbeCheck, ProbeEnd, ProbeNote
from diptych.kvtransfer.probe.reader import ReaderTests
from diptych.kvtransfer.probe.writer import WriterTests

GREETING_TIMEOUT_S: Final = 30.0  # a peer answers between two steps, which may be long


@dataclass(slots=True)
class _Test:
    """The test of one link; kept while the link is open."""

    ours: Directions
    paths: tuple[str, ...]
    refusal: str  # why we must not write, where there is no path
    deadline_s: float | None  # for the peer's greeting; None: it has come
    left: deque[WriterTests | ReaderTests] = field(default_factory=deque)  # to be passed; the first one runs
    passed: list[Passed] = field(default_factory=list)

    @property
    def verdict(self) -> Passed:
        """What we write with counts, where we write; how pages come in is told as well."""
        first = next((passed for passed in self.passed if passed.results), self.passed[0])
        return replace(first, inbound=next((passed.inbound for passed in self.passed if passed.inbound), ""))


class TwoWayTests:
    """All tests of one process. `directions`: those of pages at this end, in links that come up from now on."""

    def __init__(self, instance_id: int, directions: Directions, writer: WriterTests, reader: ReaderTests) -> None:
        self.directions = directions
        self._instance_id = instance_id
        self._writer = writer
        self._reader = reader
        self._tests: dict[int, _Test] = {}

    def covers(self, peer: int) -> bool:
        """Whether the peer was told of every direction in which pages may go now, so that it was or will be tested.

        A link that is open without a test is being closed.
        """
        test = self._tests.get(peer)
        return test is None or self.directions.is_within(test.ours)

    def begin(self, peer: int, paths: tuple[str, ...], now_s: float, refusal: str = "") -> list[Action]:
        """A link came up; `paths` are those that may be used, best first.

        Where there is none, `refusal` says why; it matters only if pages are to go there.
        """
        self._tests[peer] = _Test(self.directions, paths, refusal, now_s + GREETING_TIMEOUT_S)
        return [SendProbeNote(peer, self.directions)]

    def receive(self, peer: int, note: ProbeNote, now_s: float) -> list[Action]:
        """A note came over a link that is tested."""
        match note:
            case Directions():
                return self._greeted(peer, note, now_s)
            case ProbeAsk() | ProbeCheck() | ProbeEnd():
                return self._follow(self._reader.receive(peer, note, now_s), now_s)
            case _:
                return self._follow(self._writer.receive(peer, note, now_s), now_s)

    def done(self, action: Action, done: Done, now_s: float) -> list[Action]:
        """An action of ours ended."""
        match action:
            case SendProbeNote(peer, Directions()):
                return [] if done.error is None else [Failed(peer, done.error)]
            case Write() | Measure() | UsePath() | FillProbe() | SendProbeNote(_, ProbeAsk() | ProbeEnd()):
                return self._follow(self._writer.done(action.peer, done, now_s), now_s)
            case Digest() | SendProbeNote():
                return self._follow(self._reader.done(action.peer, done, now_s), now_s)
        raise AssertionError(f"{action} has no end")

    def end(self, peer: int, now_s: float) -> list[Action]:
        """The link is down."""
        self._tests.pop(peer, None)
        return [*self._writer.end(peer, now_s), *self._reader.end(peer, now_s)]

    def expire(self, now_s: float) -> list[Action]:
        """End the tests that take too long."""
        actions: list[Action] = []
        for peer, test in self._tests.items():
            if test.deadline_s is not None and test.deadline_s <= now_s:
                test.deadline_s = None
                actions.append(Failed(peer, f"no greeting within {GREETING_TIMEOUT_S:g} s"))
        return [*actions, *self._writer.expire(now_s), *self._reader.expire(now_s)]

    def next_deadline_s(self) -> float | None:
        times = [test.deadline_s for test in self._tests.values()]
        times += [self._writer.next_deadline_s(), self._reader.next_deadline_s()]
        return min((at_s for at_s in times if at_s is not None), default=None)

    def _greeted(self, peer: int, theirs: Directions, now_s: float) -> list[Action]:
        test = self._tests.get(peer)
        if test is None or test.deadline_s is None:
            return []
        test.deadline_s = None
        wanted = test.ours.towards(theirs)
        if wanted.out and not test.paths:
            return [Failed(peer, test.refusal)]
        tests: list[WriterTests | ReaderTests] = [self._writer] if wanted.out else []
        tests += [self._reader] if wanted.into else []
        test.left.extend(tests if self._instance_id < peer else reversed(tests))
        if not test.left:
            return [Failed(peer, "the roles of the two workers exchange no pages")]
        return self._start_next(peer, test, now_s)

    def _start_next(self, peer: int, test: _Test, now_s: float) -> list[Action]:
        return self._follow(test.left[0].begin(peer, test.paths, now_s), now_s)

    def _follow(self, actions: list[Action], now_s: float) -> list[Action]:
        """Where one direction has passed its test, go on with the other one."""
        followed: list[Action] = []
        for action in actions:
            followed += self._one_passed(action, now_s) if isinstance(action, Passed) else [action]
        return followed

    def _one_passed(self, passed: Passed, now_s: float) -> list[Action]:
        test = self._tests[passed.peer]
        test.left.popleft()
        test.passed.append(passed)
        return self._start_next(passed.peer, test, now_s) if test.left else [test.verdict]
