"""When what failed is tried again."""

from __future__ import annotations

from diptych.planner.pools.patience import LONGEST_S, Patience


def test_pauses_double_up_to_the_longest_however_often_it_fails() -> None:
    patience = Patience()
    pauses = [patience.failed("pool", 0.0) for _ in range(1100)]  # a week of failures
    assert pauses[:4] == [15.0, 30.0, 60.0, 120.0]
    assert pauses[-1] == LONGEST_S
    assert not patience.may_try("pool", LONGEST_S - 1)
    assert patience.may_try("pool", LONGEST_S)
    patience.worked("pool")
    assert patience.failed("pool", 0.0) == 15.0
