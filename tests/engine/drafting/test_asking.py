"""How often a request is asked about."""

from __future__ import annotations

from diptych.engine.drafting.asking import IDLE_SHARE, Asking

TOKEN_S = 0.01


def waits(asking: Asking, saved_s: float, num_times: int) -> list[int]:
    """Return how many tokens pass from each time to the next."""
    found = []
    for _ in range(num_times):
        asking.note_worth(saved_s, asking.ask_at, TOKEN_S)
        found.append(asking.wait)
    return found


def test_what_does_not_pay_is_done_less_often_until_it_is_a_small_share_of_a_step() -> None:
    asking = Asking()
    asking.note_time(10 * IDLE_SHARE * TOKEN_S)
    assert waits(asking, 0.0, 6) == [2, 4, 8, 10, 10, 10]
    assert asking.ask_at == 1 + 3 + 7 + 3 * 9
    assert waits(asking, 1.0, 2) == [1, 1]


def test_the_time_that_it_takes_is_that_of_sources_and_of_all_beside_and_changes_slowly() -> None:
    asking = Asking(guessing_s=0.002)
    asking.note_time(0.001)
    assert asking.asking_s == 0.003
    asking.note_time(0.101)
    assert 0.003 < asking.asking_s < 0.03
