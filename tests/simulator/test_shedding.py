"""Sheddable tiers give way in virtual time by the router's own rule."""

from __future__ import annotations

import numpy as np

from diptych.generation.slo import Slo
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.generators.named import generate

CALLS = generate("bimodal", 70, 25.0, 0)
TIGHT, BATCH = Slo(0.3, 0.05), Slo(30.0, 0.0, weight=0.1)


def served(batch: Slo) -> Outcome:
    tiers = {"default": Slo(), "tight": TIGHT, "batch": batch}
    return simulate(Setup((WorkerSetup(),), slo=tiers["default"], tiers=tiers), CALLS)


def num_kept(outcome: Outcome) -> int:
    tight = np.array([call.tier == "tight" for call in CALLS])
    return int(np.sum((outcome.ttft_s <= TIGHT.ttft_s) & (outcome.tpot_s <= TIGHT.tpot_s) & tight))


def test_a_sheddable_tier_gives_way_to_those_that_are_not_and_only_it_does_the_same_each_time() -> None:
    patient, sheddable, again = served(BATCH), *(served(BATCH._replace(sheddable=True)) for _ in range(2))
    assert set(patient.failure) == {""}
    refused = {call.tier for call, failure in zip(CALLS, sheddable.failure, strict=True) if failure == "refused: shed"}
    assert refused == {"batch"}
    assert num_kept(sheddable) > 1.5 * num_kept(patient)
    assert (sheddable.failure, sheddable.decisions_digest) == (again.failure, again.decisions_digest)


def test_where_there_is_room_nobody_gives_way() -> None:
    calls = generate("bimodal", 20, 1.0, 0)
    tiers = {"tight": TIGHT, "batch": BATCH._replace(sheddable=True)}
    assert set(simulate(Setup((WorkerSetup(),) * 2, tiers=tiers), calls).failure) == {""}
