"""The writing side of link tests: brings a pattern over each path, has the peer say what arrived, and times the path.

The first path that brought the right bytes is used, unless a later one is faster by far; one that brought wrong
bytes is never used. One link is tested at a time, so that tests do not slow each other down.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from diptych.kvtransfer.probe.actions import (
    Action,
    Done,
    Failed,
    FillProbe,
    Measure,
    Passed,
    PathResult,
    SendProbeNote,
    UsePath,
    Write,
)
from diptych.kvtransfer.probe.notes import ProbeAsk, ProbeCheck, ProbeEnd, ProbeFound, ProbeNote, ProbeOffer

TIMEOUT_S: Final = 5.0  # without any progress
CLEARLY_FASTER: Final = 16.0  # times, for a later path to be used: busy cores mislead short tests
FIRST_ROUNDS: Final = 16
MORE_ROUNDS: Final = 8  # times as many, while a measurement was too short
MAX_ROUNDS: Final = 1024
MIN_MEASURE_S: Final = 0.002


class _Phase(enum.Enum):
    ASKING = "asking for pages"
    VERIFYING = "verifying"
    MEASURING = "measuring"
    ENDING = "telling that no path works"
    FAILED = "failed"  # the link is being closed


@dataclass(slots=True)
class _Test:
    peer: int
    paths: tuple[str, ...]  # that are still to be tested; the first is being tested
    phase: _Phase = _Phase.ASKING
    deadline_s: float = 0.0
    offer: ProbeOffer | None = None
    num_pending: int = 0  # actions that have not ended
    written: int | None = None  # digest
    found: int | None = None  # digest
    num_rounds: int = FIRST_ROUNDS
    results: list[PathResult] = field(default_factory=list)


class WriterTests:
    """One direction of `TwoWayTests`, whose methods it has: for workers that write pages."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: deque[_Test] = deque()
        self._test: _Test | None = None  # that runs

    def begin(self, peer: int, paths: tuple[str, ...], now_s: float) -> list[Action]:
        self._waiting.append(_Test(peer, paths))
        return self._start_next(now_s)

    def receive(self, peer: int, note: ProbeNote, now_s: float) -> list[Action]:
        test = self._running(peer)
        if test is None:
            return []
        match note:
            case ProbeOffer(pages, page_size) if pages and page_size:
                test.offer = note
            case ProbeFound(digest):
                test.found = digest
        return self._advance(test, now_s)

    def done(self, peer: int, done: Done, now_s: float) -> list[Action]:
        test = self._running(peer)
        if test is None:
            return []
        test.num_pending -= 1
        if done.error is not None:
            return self._op_failed(test, done.error, now_s)
        if test.phase is _Phase.VERIFYING:
            test.written = done.digest
        elif test.phase is _Phase.MEASURING:
            return self._measured(test, done, now_s)
        return self._advance(test, now_s)

    def end(self, peer: int, now_s: float) -> list[Action]:
        self._waiting = deque(test for test in self._waiting if test.peer != peer)
        if self._test is not None and self._test.peer == peer:
            self._test = None
        return self._start_next(now_s)

    def expire(self, now_s: float) -> list[Action]:
        test = self._test
        if test is None or test.phase is _Phase.FAILED or test.deadline_s > now_s:
            return []
        where = f" path {test.paths[0]}" if test.paths else ""
        return self._fail(test, f"no answer within {TIMEOUT_S:g} s while {test.phase.value}{where}")

    def next_deadline_s(self) -> float | None:
        return None if self._test is None or self._test.phase is _Phase.FAILED else self._test.deadline_s

    def _running(self, peer: int) -> _Test | None:
        """Return the peer's test, unless it waits for its turn, has ended or has failed."""
        test = self._test
        return test if test is not None and test.peer == peer and test.phase is not _Phase.FAILED else None

    def _start_next(self, now_s: float) -> list[Action]:
        if self._test is not None or not self._waiting:
            return []
        self._test = self._waiting.popleft()
        return self._did(self._test, now_s, SendProbeNote(self._test.peer, ProbeAsk()))

    def _advance(self, test: _Test, now_s: float) -> list[Action]:
        """Go on, once the path may be changed: when nothing is in flight."""
        test.deadline_s = now_s + TIMEOUT_S
        if test.num_pending:
            return []
        match test.phase:
            case _Phase.ASKING if test.offer is not None:
                return self._verify(test, now_s)
            case _Phase.VERIFYING if test.found is not None and test.found == test.written:
                test.num_rounds = FIRST_ROUNDS
                return self._measure(test, now_s)
            case _Phase.VERIFYING if test.found is not None:
                return self._on_result(test, PathResult(test.paths[0], error="its bytes arrived wrong"), now_s)
            case _Phase.ENDING:
                return self._fail(test, _words(test.results))
        return []

    def _verify(self, test: _Test, now_s: float) -> list[Action]:
        test.phase, test.written, test.found = _Phase.VERIFYING, None, None
        assert test.offer is not None
        path, fill = UsePath(test.peer, test.paths[0]), FillProbe(test.peer, self._rng.getrandbits(64))
        return self._did(test, now_s, path, fill, Write(test.peer, test.offer, ProbeCheck()))

    def _measure(self, test: _Test, now_s: float) -> list[Action]:
        assert test.offer is not None
        test.phase = _Phase.MEASURING
        return self._did(test, now_s, Measure(test.peer, test.offer, test.num_rounds))

    def _measured(self, test: _Test, done: Done, now_s: float) -> list[Action]:
        if 0 < done.seconds < MIN_MEASURE_S and test.num_rounds < MAX_ROUNDS:
            test.num_rounds *= MORE_ROUNDS
            return self._measure(test, now_s)
        speed = done.nbytes / done.seconds if done.seconds else 0.0
        return self._on_result(test, PathResult(test.paths[0], speed), now_s)

    def _op_failed(self, test: _Test, error: str, now_s: float) -> list[Action]:
        if test.phase in (_Phase.VERIFYING, _Phase.MEASURING):
            return self._on_result(test, PathResult(test.paths[0], error=error), now_s)
        return self._fail(test, error)

    def _on_result(self, test: _Test, result: PathResult, now_s: float) -> list[Action]:
        test.results.append(result)
        test.paths = test.paths[1:]
        if test.paths:
            return self._verify(test, now_s)
        best = fastest(test.results)
        if best is None:
            test.phase = _Phase.ENDING
            return self._did(test, now_s, SendProbeNote(test.peer, ProbeEnd("", reason=_words(test.results))))
        self._test = None
        return [
            UsePath(test.peer, best.path),
            SendProbeNote(test.peer, ProbeEnd(best.path, best.bytes_per_s)),
            Passed(test.peer, best.path, best.bytes_per_s, tuple(test.results)),
            *self._start_next(now_s),
        ]

    def _fail(self, test: _Test, reason: str) -> list[Action]:
        test.phase = _Phase.FAILED
        return [Failed(test.peer, reason, tuple(test.results))]

    def _did(self, test: _Test, now_s: float, *actions: Action) -> list[Action]:
        """Note that `actions`, of which the last one will be answered, are performed now."""
        test.num_pending += 1
        test.deadline_s = now_s + TIMEOUT_S
        return list(actions)


def fastest(results: list[PathResult]) -> PathResult | None:
    """Return the result of the path to use; None when none works."""
    good = [result for result in results if not result.error]
    best = good[0] if good else None
    for result in good[1:]:
        if best is not None and result.bytes_per_s > best.bytes_per_s * CLEARLY_FASTER:
            best = result
    return best


def _words(results: list[PathResult]) -> str:
    return "no path works: " + "; ".join(f"{result.path}: {result.error}" for result in results)
