from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from diptych.router.choose.cached_prefixes import ApproximateIndex
from diptych.router.choose.page_chain import text_hashes

TTL_S = 8
WORKERS = st.integers(1, 3)
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_worker_has_what_was_sent_to_it(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S)
    index.note(1, [10, 11, 12])
    index.note(2, [10, 20])
    index.note(2, [10, 21])
    assert index.holders([10, 11, 13]) == {1: 2, 2: 1}
    assert index.holders([10, 21, 22]) == {1: 1, 2: 2}
    assert (index.holders([30]), index.holders([])) == ({}, {})


def test_what_is_not_used_is_forgotten_in_time(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S)
    index.note(1, [10, 11])
    clock.now_s += TTL_S / 2
    index.note(1, [10])
    clock.now_s += TTL_S / 2
    assert index.holders([10, 11]) == {1: 1}
    clock.now_s += TTL_S / 2
    assert index.holders([10, 11]) == {}
    assert index.nbytes == 0


def test_nothing_outlives_its_time_because_nobody_looked(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S)
    index.note(1, [10])
    clock.now_s += 0.9 * TTL_S
    assert index.holders([10]) == {1: 1}
    clock.now_s += 0.2 * TTL_S
    assert index.holders([10]) == {}


def test_what_is_used_least_is_forgotten_when_memory_ends(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S, max_blocks=8)
    index.note(1, [10, 11, 12])
    index.note(2, [20, 21])
    index.note(1, [10, 11, 12])
    index.note(2, [30, 31])
    assert [index.holders(chain) for chain in ([10, 11, 12], [20, 21], [30, 31])] == [{1: 3}, {}, {2: 2}]


def test_of_a_prompt_that_does_not_fit_the_beginning_is_known(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S, max_blocks=4)
    index.note(1, [10, 11, 12])
    assert index.holders([10, 11, 12]) == {1: 2}


def test_a_worker_that_is_gone_holds_nothing(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S)
    index.note(1, [10])
    index.forget(1)
    index.forget(2)
    assert index.holders([10]) == {}


def test_a_text_that_nobody_has_tokenized_is_found_by_its_blocks(clock: Clock) -> None:
    index = ApproximateIndex(clock, TTL_S)
    index.note(1, text_hashes(b"abcdefghij", 4))
    assert index.holders(text_hashes(b"abcdefghijkl", 4)) == {1: 2}
    assert index.holders(text_hashes(b"abcdefghijkl", 4, b"salt")) == {}
    assert index.holders(text_hashes("äö".encode(), 4)) == {}


class IndexAndModel(RuleBasedStateMachine):
    """A naive model remembers when each worker was last sent each prefix; the index may forget some of it early."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index = ApproximateIndex(self.clock, TTL_S)
        self.noted_s: dict[tuple[int, tuple[int, ...]], float] = {}

    def chain(self, text: list[int]) -> list[int]:
        return [1 + abs(hash(tuple(text[:end]))) for end in range(1, len(text) + 1)]

    def model(self, worker: int, text: list[int], younger_than_s: float) -> int:
        prefixes = [(worker, tuple(text[:end])) for end in range(1, len(text) + 1)]
        oldest_s = self.clock.now_s - younger_than_s
        return len(list(takewhile(lambda prefix: self.noted_s.get(prefix, 0) > oldest_s, prefixes)))

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds

    @rule(worker=WORKERS, text=TEXTS)
    def note(self, worker: int, text: list[int]) -> None:
        self.index.note(worker, self.chain(text))
        self.noted_s |= {(worker, tuple(text[:end])): self.clock.now_s for end in range(1, len(text) + 1)}

    @rule(worker=WORKERS)
    def forget(self, worker: int) -> None:
        self.index.forget(worker)
        self.noted_s = {key: noted_s for key, noted_s in self.noted_s.items() if key[0] != worker}

    @rule(text=TEXTS)
    def look_up(self, text: list[int]) -> None:
        found = self.index.holders(self.chain(text))
        for worker in (1, 2, 3):
            at_least, at_most = self.model(worker, text, TTL_S / 2), self.model(worker, text, TTL_S)
            assert at_least <= found.get(worker, 0) <= at_most


TestIndexAndModel = IndexAndModel.TestCase
TestIndexAndModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
