"""The targets that the page on autoscaling names, against the autoscaler's rules: `bench/autoscaling.py`."""

from __future__ import annotations

from itertools import pairwise

import pytest
from autoscaling import BEHAVIOR, BURST_S, HIGHEST, QUIET_S, burst, decode, prefill, steady
from scaling.autoscaler import Autoscaler, Measure
from scaling.run import Run


def sizes_after(measures: list[float], size: int, highest: int = 99) -> list[int]:
    """Return the sizes, a decision every 15 s, for sums of a metric of which a worker should have 1."""
    scaler, sizes = Autoscaler(BEHAVIOR, 1, highest), []
    for number, total in enumerate(measures):
        size = scaler.decide([Measure(total, 1.0)], size, 15.0 * number)
        sizes.append(size)
    return sizes


def test_the_autoscaler_doubles_every_thirty_seconds_at_most_and_stays_below_its_limit() -> None:
    assert sizes_after([100] * 7, 2, highest=30) == [4, 4, 8, 8, 16, 16, 30]


def test_the_autoscaler_shrinks_after_five_minutes_of_less_by_one_a_minute() -> None:
    sizes = sizes_after([4.0, *[1.0] * 32], 4)
    assert [sizes.index(size) for size in (4, 3, 2)] == [0, 21, 25]


def test_a_tenth_more_or_less_changes_nothing() -> None:
    assert sizes_after([4.39, 3.61], 4) == [4, 4]


def follows(run: Run) -> None:
    """Grew within a minute of the burst and by all that it may, did not swing, and shrank again."""
    grew = [second for second, step in run.changes if step > 0 and second >= QUIET_S]
    assert grew[0] <= QUIET_S + 60
    assert max(run.sizes) <= HIGHEST
    assert min(run.sizes[QUIET_S + 300 : QUIET_S + BURST_S]) >= 6 / 0.8
    assert run.sizes[-1] <= 3

    for (before_s, before), (after_s, after) in pairwise(run.changes):
        assert not (before > 0 > after and after_s - before_s < BEHAVIOR.down_window_s)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_prefill_pool_follows_a_burst_and_does_nothing_else(seed: int) -> None:
    run = prefill(burst, seed=seed)
    follows(run)
    assert run.num_turns == 1  # up once, down once
    assert not [second for second, _ in prefill(steady, seed=seed).changes if second > 600]


def test_a_prefill_pool_that_is_scaled_by_a_short_queue_alone_swings() -> None:
    assert prefill(steady, backlog_s=1.0, busy=1e9).num_turns > 5


@pytest.mark.parametrize("seed", [1, 2])
def test_a_decode_pool_follows_a_burst_and_shrinks_no_sooner_than_five_minutes_after_it_grew(seed: int) -> None:
    follows(decode(burst, seed=seed))
