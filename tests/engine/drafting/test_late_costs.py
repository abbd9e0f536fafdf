"""What passes take in which states see what came true."""

from __future__ import annotations

import pytest

from diptych.engine.drafting.budget import share_out
from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.step_costs import KNOWN, StepCosts


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 0.0), (1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0), (8, 4.0)])
def test_they_lie_on_lines_between_those_that_were_measured(num_tokens: int, seconds: float) -> None:
    assert LateCosts(lambda: ((2, 1.0), (4, 2.0))).at(num_tokens) == seconds
    assert NO_PASS.at(num_tokens) == 0.0


def test_they_are_asked_for_once_and_not_before_a_draft() -> None:
    asked = []

    def measured() -> tuple[tuple[int, float], ...]:
        asked.append(1)
        return ((1, 1.0),)

    late = LateCosts(measured)
    assert late.at(0) == 0.0
    assert not asked
    assert [late.at(1), late.at(2)] == [1.0, 2.0]
    assert len(asked) == 1


def test_a_draft_pays_its_share_of_the_pass_and_what_is_seen_of_its_row() -> None:
    """States see two and a half tokens of a row of two drafts, of which one and a half come true."""

    def costs(late: LateCosts) -> StepCosts:
        found = StepCosts(late)
        for num_tokens in (1, 3):
            for _ in range(KNOWN):
                found.learn(num_tokens, 1.0)
        return found

    chances = [[1.0, 0.5]]
    assert share_out(chances, 1, costs(NO_PASS), 10).extra_s == 0.0
    shares = share_out(chances, 1, costs(LateCosts(lambda: ((1, 0.1), (10, 1.0)))), 10)
    assert shares.counts == [2]
    assert shares.extra_s == pytest.approx(0.25)
    assert share_out(chances, 1, costs(LateCosts(lambda: ((1, 1.6),))), 10).counts == [0]
