"""Ends that test their links in both directions at once, joined by a medium that is a dictionary."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from diptych.kvtransfer.probe.actions import (
    Action,
    Digest,
    Done,
    Failed,
    FillProbe,
    Measure,
    Passed,
    SendProbeNote,
    Write,
)
from diptych.kvtransfer.probe.notes import Directions
from diptych.kvtransfer.probe.reader import ReaderTests
from diptych.kvtransfer.probe.two_way import GREETING_TIMEOUT_S, TwoWayTests
from diptych.kvtransfer.probe.writer import WriterTests

BOTH, OUT, INTO = Directions(out=True, into=True), Directions(out=True, into=False), Directions(out=False, into=True)
PAGE_SIZE = 16


class Mesh:
    """Ends by instance id, each linked to all others. What an end wants is done link by link, in random order.

    An end that may use a link says so to its peer at once, which must then use it, too.
    """

    def __init__(self, *directions: Directions, seed: int = 0, damaged: tuple[int, int] = (0, 0)) -> None:
        self.rng = random.Random(seed)
        self.damaged = damaged  # writer and reader
        self.ends = {
            number: TwoWayTests(number, each, WriterTests(random.Random(number)), ReaderTests(range(6), PAGE_SIZE))
            for number, each in enumerate(directions, 1)
        }
        self.patterns = dict.fromkeys(self.ends, 0)
        self.memory: dict[tuple[int, int], int] = {}  # (end, page) -> pattern
        self.queues: dict[tuple[int, int], deque[Action]] = {}
        self.verdicts: dict[tuple[int, int], Passed | Failed] = {}
        for number, other in itertools.permutations(self.ends, 2):
            self.do(number, self.ends[number].begin(other, ("copy",), 0.0))

    def do(self, owner: int, actions: list[Action]) -> None:
        for action in actions:
            self.queues.setdefault((owner, action.peer), deque()).append(action)

    def settle(self) -> None:
        while busy := [key for key, queue in self.queues.items() if queue]:
            owner, peer = self.rng.choice(busy)
            self.perform(owner, peer, self.queues[owner, peer].popleft())

    def perform(self, owner: int, peer: int, action: Action) -> None:
        end = self.ends[owner]
        match action:
            case Passed() | Failed():
                assert (owner, peer) not in self.verdicts
                self.verdicts[owner, peer] = action
            case FillProbe(_, seed):
                self.patterns[owner] = seed
            case SendProbeNote(_, note):
                self.do(owner, end.done(action, Done(), 0.0))
                self.do(peer, self.ends[peer].receive(owner, note, 0.0))
            case Write(_, offer, note):
                pattern = self.patterns[owner]
                for page in offer.pages:
                    self.memory[peer, page] = pattern ^ ((owner, peer) == self.damaged)
                self.do(owner, end.done(action, Done(digest=hash((pattern,) * len(offer.pages))), 0.0))
                self.do(peer, self.ends[peer].receive(owner, note, 0.0))
            case Measure():
                self.do(owner, end.done(action, Done(nbytes=100 * owner, seconds=1.0), 0.0))
            case Digest(_, pages):
                digest = hash(tuple(self.memory.get((owner, page), 0) for page in pages))
                self.do(owner, end.done(action, Done(digest=digest), 0.0))


@pytest.mark.parametrize("seed", range(20))
def test_links_between_ends_that_all_test_each_other_pass_in_any_order(seed: int) -> None:
    mesh = Mesh(BOTH, BOTH, OUT, INTO, seed=seed)
    mesh.settle()
    links = set(itertools.permutations(range(1, 5), 2))
    assert set(mesh.verdicts) == links
    assert all(isinstance(verdict, Passed) for verdict in mesh.verdicts.values())


def test_the_speed_is_that_of_the_direction_in_which_an_end_writes() -> None:
    mesh = Mesh(BOTH, BOTH, INTO)
    mesh.settle()
    found = {key: (verdict.bytes_per_s, bool(verdict.results)) for key, verdict in mesh.verdicts.items()}  # type: ignore[union-attr]
    assert found == {
        (1, 2): (100.0, True),
        (2, 1): (200.0, True),
        (1, 3): (100.0, True),
        (3, 1): (100.0, False),
        (2, 3): (200.0, True),
        (3, 2): (200.0, False),
    }


def test_an_end_that_is_written_to_knows_by_which_path_whether_or_not_it_writes_itself() -> None:
    mesh = Mesh(BOTH, BOTH, INTO)
    mesh.settle()
    found = {key: verdict.inbound for key, verdict in mesh.verdicts.items() if isinstance(verdict, Passed)}
    assert found == {(1, 2): "copy", (2, 1): "copy", (1, 3): "", (3, 1): "copy", (2, 3): "", (3, 2): "copy"}


@pytest.mark.parametrize("damaged", [(1, 2), (2, 1)])
def test_a_link_that_is_wrong_in_one_direction_is_used_in_none(damaged: tuple[int, int]) -> None:
    mesh = Mesh(BOTH, BOTH, damaged=damaged)
    mesh.settle()
    reason = "no path works: copy: its bytes arrived wrong"
    assert {key: verdict.reason for key, verdict in mesh.verdicts.items()} == dict.fromkeys([(1, 2), (2, 1)], reason)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_end_that_knows_first_sends_arrives_when_the_other_knows(seed: int) -> None:
    mesh = Mesh(BOTH, BOTH, seed=seed)
    while not mesh.verdicts:
        (owner, peer) = mesh.rng.choice([key for key, queue in mesh.queues.items() if queue])
        mesh.perform(owner, peer, mesh.queues[owner, peer].popleft())
    ((first, other),) = mesh.verdicts
    assert not mesh.queues[first, other]  # nothing of the test is behind what it sends now
    assert [type(action) for action in mesh.queues[other, first]] == [Passed]


def test_two_ends_between_which_pages_go_neither_way_say_so() -> None:
    mesh = Mesh(OUT, OUT)
    mesh.settle()
    reason = "the roles of the two workers exchange no pages"
    assert mesh.verdicts == {(1, 2): Failed(2, reason), (2, 1): Failed(1, reason)}


def test_a_peer_that_does_not_greet_is_let_go_once() -> None:
    (end,) = Mesh(BOTH).ends.values()
    end.begin(2, ("copy",), 1.0)
    assert end.next_deadline_s() == 1.0 + GREETING_TIMEOUT_S
    assert end.expire(1.0 + GREETING_TIMEOUT_S) == [Failed(2, "no greeting within 30 s")]
    assert end.expire(100.0) == []
    assert end.next_deadline_s() is None
    assert end.receive(2, BOTH, 100.0) == []


def test_a_link_covers_what_the_peer_was_told() -> None:
    (end,) = Mesh(INTO).ends.values()
    end.begin(2, ("copy",), 0.0)
    covered = []
    for end.directions in (INTO, BOTH, OUT):
        covered.append(end.covers(2))
    assert covered == [True, False, False]
    assert end.covers(3)  # it is being closed: it never came to its test
