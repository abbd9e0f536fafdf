"""Where experts are: each somewhere, no rank with more than its room, and never worse than in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.values.expert_placement import ExpertPlacement, balanced, in_order


@given(st.data())
def test_a_balanced_placement_has_every_expert_within_its_room_and_is_never_heavier(data: st.DataObject) -> None:
    load = data.draw(st.lists(st.integers(0, 1000), min_size=2, max_size=24))
    num_ranks = data.draw(st.integers(2, min(8, len(load))))
    redundant = data.draw(st.integers(0, min(8, len(load) * (num_ranks - 1))))
    found = balanced(load, num_ranks, redundant)
    assert {expert for own in found.of_ranks for expert in own} == set(range(len(load)))
    assert all(len(set(own)) == len(own) for own in found.of_ranks)
    assert max(map(len, found.of_ranks)) <= -(-(len(load) + redundant) // num_ranks)
    assert max(found.work(load)) <= max(in_order(len(load), num_ranks).work(load)) + 1e-9
    assert sum(found.work(load)) == pytest.approx(sum(load))
    assert balanced(load, num_ranks, redundant) == found, "all ranks find the same"


def test_heavy_neighbours_are_parted_and_the_heaviest_gets_the_copy() -> None:
    assert balanced([9, 9, 1, 1], 2) == ExpertPlacement(((0, 2), (1, 3)))
    copied = balanced([90, 1, 1, 1], 2, 1)
    assert [len(where) for where in copied.copies()] == [2, 1, 1, 1]
    assert max(copied.work([90, 1, 1, 1])) < 48


def test_experts_that_do_not_divide_are_dealt_one_more_or_less() -> None:
    assert in_order(5, 3) == ExpertPlacement(((0,), (1, 2), (3, 4)))
    assert in_order(4, 2).copies() == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]
