from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.common.arrays import U64
from diptych.router.choose import page_set
from diptych.router.choose.page_set import PageSet, prefix_lens

HASH = st.integers(1, 300).map(lambda n: n << 40) | st.integers(1, 2**64 - 1)  # many of the first meet in a table
hashes = st.lists(HASH, max_size=120)  # enough for tables to grow and shrink


class SetAndModel(RuleBasedStateMachine):
    """A page set next to Python's own."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageSet()
        self.model: set[int] = set()

    @rule(some=hashes)
    def add(self, some: list[int]) -> None:
        self.pages.add(some)
        self.model |= set(some)

    @rule(some=hashes)
    def remove(self, some: list[int]) -> None:
        self.pages.remove(some)
        self.model -= set(some)

    @rule(data=st.data())
    def remove_most(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        self.remove(sorted(self.model - set(some)))

    @rule(some=hashes)
    def look_up(self, some: list[int]) -> None:
        found = [prefix_lens([self.pages], [page_hash]) == [1] for page_hash in some]
        assert found == [page_hash in self.model for page_hash in some]

    @invariant()
    def the_same(self) -> None:
        assert len(self.pages) == len(self.model)
        assert set(self.pages.hashes().tolist()) == self.model
        assert self.pages.nbytes <= max(8 * page_set.MIN_SLOTS, 64 * len(self.model))


TestSetAndModel = SetAndModel.TestCase
TestSetAndModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@given(chain=st.lists(HASH, unique=True, max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_the_prefix_of_each_set_is_found_in_one_call(chain: list[int], cuts: list[int]) -> None:
    sets = [PageSet() for _ in cuts]
    for pages, cut in zip(sets, cuts, strict=True):
        pages.add(chain[:cut])
    assert prefix_lens(sets, chain) == [min(cut, len(chain)) for cut in cuts]


def test_of_a_chain_what_is_not_known_is_added() -> None:
    pages = PageSet()
    for chain in ([7, 8], [7, 8, 9], [7, 8], [7, 6], []):
        pages.add_chain(chain)
    assert (len(pages), set(pages.hashes().tolist())) == (4, {6, 7, 8, 9})


def test_the_hash_0_is_a_hash_like_others() -> None:
    pages = PageSet()
    pages.add([0, 7])
    assert (len(pages), prefix_lens([pages], [7, 0])) == (2, [2])
    pages.remove([0])
    assert (len(pages), prefix_lens([pages], [7, 0])) == (1, [1])


def test_a_hash_costs_at_most_22_bytes_at_any_size() -> None:
    pages = PageSet()
    for part in np.random.default_rng(0).integers(1, 2**64, (400, 97), np.uint64):
        pages.add(part)
        assert pages.nbytes <= max(8 * page_set.MIN_SLOTS, 22 * len(pages))


FACTOR = 0x9E3779B97F4A7C15
INVERSE = pow(FACTOR, -1, 2**64)
NUM_CHOSEN = 1000  # half of their table's slots

CHOSEN = {
    "by the constant factor": [INVERSE * (index << 48 | index) % 2**64 for index in range(1, NUM_CHOSEN)],
    "by their low bits": [index << 48 for index in range(1, NUM_CHOSEN)],
    "by their high bits": list(range(1, NUM_CHOSEN)),
}


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
def test_hashes_that_were_chosen_to_meet_do_not(chosen: list[int]) -> None:
    pages = PageSet()
    pages.add(chosen)
    assert longest_run(pages._table) < NUM_CHOSEN // 5


def longest_run(table: U64) -> int:
    """Return how many slots somebody may look at who looks for one hash."""
    ends = np.flatnonzero(np.concatenate([table, table]) == 0)
    return int(np.diff(ends).max())
