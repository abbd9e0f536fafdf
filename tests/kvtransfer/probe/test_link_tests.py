"""Both sides of link tests, joined by a medium that is a dictionary."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from diptych.kvtransfer.probe.actions import (
    Action,
    Digest,
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
from diptych.kvtransfer.probe.reader import TIMEOUT_S as READER_TIMEOUT_S
from diptych.kvtransfer.probe.reader import ReaderTests
from diptych.kvtransfer.probe.writer import MAX_ROUNDS, TIMEOUT_S, WriterTests, fastest

READER = 100
PAGE_NBYTES = 1 << 20
PAGE_SIZE = 16
G = float(1 << 30)  # powers of two: no rounding


@dataclass
class Path:
    """How a medium treats what goes over one path."""

    bytes_per_s: float = G
    flips_a_bit: bool = False
    writes_nothing: bool = False
    error: str | None = None


@dataclass
class Side:
    """One process: its tests, its probe memory (page -> pattern), and how its links ended."""

    tests: WriterTests | ReaderTests
    memory: dict[int, int] = field(default_factory=dict)
    fill: int = 0
    path: str = ""
    ends: dict[int, Passed | Failed] = field(default_factory=dict)


class Medium:
    """Writers 1, 2, ... linked to one reader. `settle` performs everything, in random order between the links."""

    def __init__(self, num_writers: int, paths: dict[str, Path], probe_pages: range = range(8, 16)) -> None:
        self.rng = random.Random(num_writers)
        self.paths = paths
        self.now_s = 0.0
        self.silent: set[int] = set()  # processes that do nothing any more
        self.sides = {writer: Side(WriterTests(random.Random(writer))) for writer in range(1, num_writers + 1)}
        self.sides[READER] = Side(ReaderTests(probe_pages, PAGE_SIZE))
        self.queues: dict[tuple[int, int], deque[Action]] = {}
        self.num_lent = 0  # at most, at once
        for writer in range(1, num_writers + 1):
            self.do(READER, self.sides[READER].tests.begin(writer, (), self.now_s))
            self.do(writer, self.sides[writer].tests.begin(READER, tuple(paths), self.now_s))

    def do(self, owner: int, actions: list[Action]) -> None:
        for action in actions:
            self.queues.setdefault((owner, action.peer), deque()).append(action)

    def settle(self) -> None:
        while busy := [key for key, queue in self.queues.items() if queue and key[0] not in self.silent]:
            owner, peer = self.rng.choice(busy)
            self.perform(owner, peer, self.queues[owner, peer].popleft())

    def perform(self, owner: int, peer: int, action: Action) -> None:
        side = self.sides[owner]
        match action:
            case UsePath(_, path):
                side.path = path
            case FillProbe(_, seed):
                side.fill = seed
            case SendProbeNote(_, note):
                self.do(owner, side.tests.done(peer, Done(), self.now_s))
                self.deliver(owner, peer, note)
            case Write(_, offer, note):
                self.write(owner, peer, offer.pages, note)
            case Measure(_, offer, num_rounds):
                used, nbytes = self.paths[side.path], len(offer.pages) * num_rounds * PAGE_NBYTES
                done = Done(used.error, None, nbytes, nbytes / used.bytes_per_s if used.bytes_per_s else 0.0)
                self.do(owner, side.tests.done(peer, done, self.now_s))
            case Digest(_, pages):
                self.do(owner, side.tests.done(peer, Done(digest=self.digest(pages)), self.now_s))
            case Passed() | Failed():
                side.ends[peer] = action

    def write(self, owner: int, peer: int, pages: tuple[int, ...], note: ProbeNote) -> None:
        side, path = self.sides[owner], self.paths[self.sides[owner].path]
        if not path.writes_nothing:
            for page in pages:
                self.sides[peer].memory[page] = side.fill ^ (path.flips_a_bit and page == pages[-1])
        digest = hash(tuple((page, side.fill) for page in pages))
        self.do(owner, side.tests.done(peer, Done(path.error, digest), self.now_s))
        if path.error is None:
            self.deliver(owner, peer, note)

    def digest(self, pages: tuple[int, ...]) -> int:
        return hash(tuple((page, self.sides[READER].memory.get(page, 0)) for page in pages))

    def deliver(self, owner: int, peer: int, note: ProbeNote) -> None:
        if peer not in self.silent:
            self.do(peer, self.sides[peer].tests.receive(owner, note, self.now_s))

    def verdicts(self, owner: int) -> dict[int, Passed | Failed]:
        return self.sides[owner].ends


GOOD = {"copy": Path(4 * G), "put": Path(2 * G), "message": Path(G / 2)}


def test_a_path_that_is_faster_by_far_is_used_and_both_sides_know() -> None:
    medium = Medium(1, {"copy": Path(G), "put": Path(20 * G), "message": Path(G / 2)})
    medium.settle()
    results = (PathResult("copy", G), PathResult("put", 20 * G), PathResult("message", G / 2))
    assert medium.verdicts(1) == {READER: Passed(READER, "put", 20 * G, results)}
    assert medium.verdicts(READER) == {1: Passed(1, "put", 20 * G, inbound="put")}
    assert medium.sides[1].path == "put"


@pytest.mark.parametrize("fault", [Path(8 * G, flips_a_bit=True), Path(8 * G, writes_nothing=True)])
def test_a_path_with_wrong_bytes_is_never_used(fault: Path) -> None:
    medium = Medium(1, {"copy": Path(G), "put": fault})
    medium.settle()
    wrong = PathResult("put", error="its bytes arrived wrong")
    assert medium.verdicts(1) == {READER: Passed(READER, "copy", G, (PathResult("copy", G), wrong))}


def test_a_path_that_fails_is_not_used() -> None:
    medium = Medium(1, {"copy": Path(error="no such device"), "put": Path(2 * G)})
    medium.settle()
    results = (PathResult("copy", error="no such device"), PathResult("put", 2 * G))
    assert medium.verdicts(1) == {READER: Passed(READER, "put", 2 * G, results)}


def test_a_link_without_a_working_path_fails_at_both_ends_with_the_reason() -> None:
    medium = Medium(1, {"copy": Path(flips_a_bit=True), "put": Path(error="broken")})
    medium.settle()
    reason = "no path works: copy: its bytes arrived wrong; put: broken"
    results = (PathResult("copy", error="its bytes arrived wrong"), PathResult("put", error="broken"))
    assert medium.verdicts(1) == {READER: Failed(READER, reason, results)}
    assert medium.verdicts(READER) == {1: Failed(1, reason)}


def test_many_writers_test_at_once_and_do_not_disturb_each_other() -> None:
    medium = Medium(20, GOOD)
    medium.settle()
    assert medium.verdicts(READER) == {writer: Passed(writer, "copy", 4 * G, inbound="copy") for writer in range(1, 21)}
    assert all(isinstance(medium.verdicts(writer)[READER], Passed) for writer in range(1, 21))


def test_loans_never_overlap_and_come_back() -> None:
    reader = ReaderTests(range(8, 16), PAGE_SIZE)
    offers = []
    for peer in range(1, 7):
        reader.begin(peer, (), 0.0)
        offers += reader.receive(peer, ProbeAsk(), 0.0)
    assert [offer.note for offer in offers if isinstance(offer, SendProbeNote)] == [
        ProbeOffer((8, 9), PAGE_SIZE),
        ProbeOffer((10, 11), PAGE_SIZE),
        ProbeOffer((12, 13), PAGE_SIZE),
        ProbeOffer((14, 15), PAGE_SIZE),
    ]
    assert reader.receive(2, ProbeEnd("copy", 1.0), 0.0) == [
        Passed(2, "copy", 1.0, inbound="copy"),
        SendProbeNote(5, ProbeOffer((10, 11), PAGE_SIZE)),
    ]
    assert reader.end(1, 0.0) == [SendProbeNote(6, ProbeOffer((8, 9), PAGE_SIZE))]


def test_what_came_back_last_is_lent_last_for_a_late_writer_may_still_touch_it() -> None:
    reader = ReaderTests(range(8, 16), PAGE_SIZE)
    for peer in (1, 2):
        reader.begin(peer, (), 0.0)
    reader.receive(1, ProbeAsk(), 0.0)
    reader.end(1, 0.0)
    assert reader.receive(2, ProbeAsk(), 0.0) == [SendProbeNote(2, ProbeOffer((10, 11), PAGE_SIZE))]


def test_a_writer_tests_one_link_at_a_time() -> None:
    writer = WriterTests(random.Random(0))
    assert writer.begin(1, ("copy",), 0.0) == [SendProbeNote(1, ProbeAsk())]
    assert writer.begin(2, ("copy",), 0.0) == []
    assert writer.receive(2, ProbeFound(7), 0.0) == []
    assert writer.end(1, 0.0) == [SendProbeNote(2, ProbeAsk())]


def test_a_path_is_changed_only_when_nothing_is_in_flight() -> None:
    writer = WriterTests(random.Random(0))
    writer.begin(1, ("copy",), 0.0)
    assert writer.receive(1, ProbeOffer((3,), PAGE_SIZE), 0.0) == []
    actions = writer.done(1, Done(), 0.0)
    assert [type(action) for action in actions] == [UsePath, FillProbe, Write]
    assert actions[-1] == Write(1, ProbeOffer((3,), PAGE_SIZE), ProbeCheck())


def test_every_test_has_a_pattern_of_its_own() -> None:
    seeds = set()
    for seed in range(50):
        medium = Medium(1, GOOD)
        medium.sides[1].tests = WriterTests(random.Random(seed))
        medium.queues.clear()
        medium.do(1, medium.sides[1].tests.begin(READER, tuple(GOOD), 0.0))
        medium.settle()
        seeds.add(medium.sides[1].fill)
    assert len(seeds) == 50


def test_a_short_measurement_is_repeated_with_more_rounds() -> None:
    writer = WriterTests(random.Random(0))
    writer.begin(1, ("copy",), 0.0)
    writer.done(1, Done(), 0.0)
    writer.receive(1, ProbeOffer((3,), PAGE_SIZE), 0.0)
    writer.done(1, Done(digest=5), 0.0)
    (first,) = writer.receive(1, ProbeFound(5), 0.0)
    assert isinstance(first, Measure)
    rounds = [first.num_rounds]
    while True:
        action = writer.done(1, Done(nbytes=100, seconds=1e-6), 0.0)[0]
        if not isinstance(action, Measure):
            break
        rounds.append(action.num_rounds)
    assert rounds == sorted(rounds)
    assert rounds[-1] == MAX_ROUNDS


@pytest.mark.parametrize("silent", [1, READER])
def test_a_silent_peer_fails_the_test_in_bounded_time(silent: int) -> None:
    medium = Medium(1, GOOD)
    medium.silent.add(silent)
    medium.settle()
    (other,) = {1, READER} - {silent}
    tests, timeout_s = medium.sides[other].tests, {1: TIMEOUT_S, READER: READER_TIMEOUT_S}[other]
    assert tests.next_deadline_s() == timeout_s
    assert tests.expire(timeout_s - 0.1) == []
    (failed,) = tests.expire(timeout_s)
    assert isinstance(failed, Failed)
    assert f"{timeout_s:g} s" in failed.reason
    assert tests.next_deadline_s() is None
    assert tests.expire(1e9) == []


def test_a_silent_peer_does_not_keep_others_from_their_tests() -> None:
    writer = WriterTests(random.Random(0))
    writer.begin(1, ("copy",), 0.0)
    writer.begin(2, ("copy",), 0.0)
    assert [type(action) for action in writer.expire(TIMEOUT_S)] == [Failed]
    assert writer.end(1, TIMEOUT_S) == [SendProbeNote(2, ProbeAsk())]
    assert writer.next_deadline_s() == 2 * TIMEOUT_S


def test_what_comes_after_the_end_is_ignored() -> None:
    medium = Medium(1, GOOD)
    medium.settle()
    for note in (ProbeAsk(), ProbeOffer((1,), PAGE_SIZE), ProbeCheck(), ProbeFound(1), ProbeEnd("copy")):
        assert medium.sides[1].tests.receive(READER, note, 0.0) == []
        assert medium.sides[READER].tests.receive(1, note, 0.0) == []
    assert medium.sides[1].tests.done(READER, Done(), 0.0) == []


def test_of_paths_that_are_not_far_apart_the_first_is_used() -> None:
    assert fastest([PathResult("copy", 1.0), PathResult("put", 8.0)]) == PathResult("copy", 1.0)
    assert fastest([PathResult("copy", error="bad"), PathResult("put")]) == PathResult("put")
    assert fastest([PathResult("copy", error="bad")]) is None
