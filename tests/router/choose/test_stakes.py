from __future__ import annotations

import math
import random

import pytest

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.stakes import MAX_STAKE, outputs_at_stake, prompts_stake, urgency
from diptych.router.workers.worker_view import WorkerLoad

TIGHT, LOOSE = Slo(0.3, 0.04, 4.0), Slo(30.0, 0.2, 0.5)


def load(*outputs: tuple[Slo, int]) -> WorkerLoad:
    return WorkerLoad(9, 0, 1000, outputs=outputs)


def test_outputs_of_one_s_own_slo_and_those_of_other_routers_count_one_each() -> None:
    assert outputs_at_stake(load(), TIGHT, 5, 0.02) == 5
    assert outputs_at_stake(load((TIGHT, 3)), TIGHT, 5, 0.02) == 5


def test_an_output_counts_more_the_heavier_it_is_and_the_less_it_can_spare() -> None:
    stake = outputs_at_stake(load((TIGHT, 1)), TIGHT._replace(weight=2.0), 1, 0.02)
    assert stake == pytest.approx(2.0)
    stake = outputs_at_stake(load((TIGHT, 1)), TIGHT._replace(tpot_s=0.1), 1, 0.02)
    assert stake == pytest.approx(math.sqrt(0.08 / 0.02))
    assert outputs_at_stake(load((TIGHT, 1)), LOOSE, 1, 0.039) == MAX_STAKE
    assert outputs_at_stake(load((LOOSE, 1)), TIGHT, 1, 0.039) == 1 / MAX_STAKE


@pytest.mark.parametrize("seed", range(20))
def test_what_two_requests_are_to_each_other_is_the_reverse(seed: int) -> None:
    rng = random.Random(seed)
    one, other = (Slo(rng.random(), rng.random(), rng.uniform(0.1, 10)).coarse for _ in range(2))
    pace_s = rng.random()
    there, back = (outputs_at_stake(load((a, 1)), b, 1, pace_s) for a, b in ((one, other), (other, one)))
    assert there * back == pytest.approx(1.0)


def test_prompts_to_come_count_as_those_that_came_lately() -> None:
    estimates = Estimates()
    estimates.came(0.0, 0.5)
    assert prompts_stake(estimates.usual.urgency, NO_SLO) == 1.0  # nobody has said an SLO
    for _ in range(1000):
        estimates.came(0.0, 0.5, TIGHT)
    usual = estimates.usual.urgency
    assert usual == pytest.approx(urgency(TIGHT))
    assert prompts_stake(usual, TIGHT) == pytest.approx(1.0)
    assert prompts_stake(usual, LOOSE) == MAX_STAKE
    assert prompts_stake(usual, TIGHT._replace(weight=8.0)) == pytest.approx(0.5)
