"""How many drafts each request of a step gets."""

from __future__ import annotations

from itertools import product

import pytest

from diptych.engine.drafting.budget import WORTH, share_out
from diptych.engine.drafting.step_costs import KNOWN, StepCosts


def costs_of(**seconds: float) -> StepCosts:
    costs = StepCosts()
    for name, each in seconds.items():
        for _ in range(KNOWN):
            costs.learn(int(name[1:]), each)
    return costs


CHEAP = costs_of(n1=1.0, n2=1.05, n4=1.15, n8=1.35, n16=1.75)
DEAR = costs_of(n1=1.0, n2=2.0, n4=4.0, n8=8.0, n16=16.0)


def test_drafts_that_are_likely_are_verified_where_tokens_are_cheap() -> None:
    assert share_out([[0.9, 0.8, 0.7]], 1, CHEAP, 100).counts == [3]


def test_nothing_is_verified_where_a_token_costs_as_much_as_a_step() -> None:
    shares = share_out([[0.99, 0.98]], 1, DEAR, 100)
    assert shares.counts == [0]
    assert shares.saved_s == 0.0


def test_drafts_that_are_not_worth_their_token_are_cut_off() -> None:
    assert share_out([[0.9, 0.8, 0.01, 0.01]], 1, CHEAP, 100).counts == [2]


def test_who_is_likelier_gets_them() -> None:
    assert share_out([[0.9, 0.85], [0.02, 0.01]], 2, CHEAP, 100).counts == [2, 0]


def test_no_more_are_shared_out_than_a_step_may_have() -> None:
    assert sum(share_out([[0.9] * 8, [0.9] * 8], 2, CHEAP, 5).counts) == 5
    assert share_out([[0.9] * 8], 1, CHEAP, -1).counts == [0]


def test_nobody_has_drafts_before_it_is_known_what_a_step_takes_without() -> None:
    assert share_out([[0.99]], 3, CHEAP, 100).counts == [0]


def test_no_step_is_larger_than_twice_what_was_measured() -> None:
    assert share_out([[0.99] * 10], 1, costs_of(n1=1.0, n2=1.0), 100).counts == [3]


def test_a_wall_of_costs_is_stepped_over_where_what_is_behind_it_pays() -> None:
    """As where a larger graph begins: two tokens take as long as eight."""
    costs = costs_of(n1=1.0, n2=1.9, n4=1.92, n8=1.95)
    assert share_out([[0.95] * 7], 1, costs, 100).counts == [7]
    assert share_out([[0.99]], 1, costs, 100).counts == [1]
    assert share_out([[0.8]], 1, costs, 100).counts == [0]


def test_what_is_expected_of_them_is_said() -> None:
    shares = share_out([[0.5], [1.0, 0.5]], 2, costs_of(n2=1.0, n3=1.1, n4=1.2, n5=1.3), 100)
    assert shares.counts == [1, 2]
    assert shares.gains == [0.5, 1.5]
    assert shares.saved_s == pytest.approx(2.0 - 1.3)  # two steps' tokens in one that is longer


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_no_other_shares_bring_more_tokens_a_second(costs: StepCosts) -> None:
    rows = [[0.8, 0.5, 0.2], [0.6, 0.55], [0.3]]
    known = costs_of(**{f"n{n}": costs.at(n) for n in range(1, 12)})

    def rate(counts: tuple[int, ...]) -> float:
        expected = 3 + sum(sum(row[:count]) for row, count in zip(rows, counts, strict=True))
        return expected / known.at(3 + sum(counts))

    best = max(product(range(4), range(3), range(2)), key=rate)
    shared = tuple(share_out(rows, 3, known, 100).counts)
    assert rate(shared) == pytest.approx(rate(best))
    assert rate(shared) >= rate((0, 0, 0))
    assert shared == (0, 0, 0) or rate(shared) > WORTH * rate((0, 0, 0))
