"""The memory that bodies take together."""

from __future__ import annotations

import pytest

from diptych.common.errors import Overloaded
from diptych.router.admission.body_budget import SMALL_BYTES, BodyBudget
from diptych.router.errors import RateLimited

BIG = 2 * SMALL_BYTES


def test_one_caller_holds_a_quarter_at_most_and_leaves_the_others_theirs() -> None:
    budget = BodyBudget(16 * BIG)
    for _ in range(4):
        budget.hold("alice").grow_to(BIG)
    with pytest.raises(RateLimited, match=f"'alice' would take more than {4 * BIG} bytes") as refused:
        budget.hold("alice").grow_to(SMALL_BYTES + 1)
    assert refused.value.retry_after_s == 1
    budget.hold("bob").grow_to(4 * BIG)
    assert budget.num_bytes == 8 * BIG


def test_all_together_hold_no_more_than_there_is_and_callers_without_a_name_all_of_it() -> None:
    budget = BodyBudget(4 * BIG)
    nobody = budget.hold("")
    nobody.grow_to(3 * BIG)
    budget.hold("bob").grow_to(BIG)
    with pytest.raises(Overloaded, match=f"more than {4 * BIG} bytes together"):
        nobody.grow_to(3 * BIG + 1)
    assert budget.num_bytes == 4 * BIG


def test_what_has_ended_is_given_back_once_and_leaves_nothing_behind() -> None:
    budget = BodyBudget(16 * BIG)
    body = budget.hold("alice")
    for num_bytes in (1, SMALL_BYTES, SMALL_BYTES + 1, BIG):
        body.grow_to(num_bytes)
    assert budget.num_bytes == BIG
    for _ in range(2):
        body.release()
    assert (budget.num_bytes, budget._held) == (0, {})


def test_a_refusal_takes_nothing() -> None:
    budget = BodyBudget(4 * BIG)
    body = budget.hold("alice")
    with pytest.raises(RateLimited):
        body.grow_to(BIG + 1)
    body.release()
    assert (budget.num_bytes, budget._held) == (0, {})


def test_small_bodies_take_nothing_of_it() -> None:
    budget = BodyBudget(1)
    budget.hold("alice").grow_to(SMALL_BYTES)
    assert budget.num_bytes == 0
