"""Outputs of a late worker go on at another one in virtual time: the product's own rule, cores and hand-off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.engine.values.step_model import StepModel
from diptych.generation.slo import Slo
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import Platform, simulate
from diptych.simulator.setup import Drain, Kill, RouterSetup, Setup, WorkerSetup
from diptych.simulator.traces.call import BLOCK_TOKENS, Call

TPOT_S = 0.03
WORKER = WorkerSetup(step_model=StepModel(step=0.005, context=1e-6, prompt_token=1e-6))
SETUP = Setup((WORKER, WORKER), policy="consistent_hash", slo=Slo(ttft_s=5.0, tpot_s=TPOT_S))
STAYING = replace(SETUP, router=RouterSetup(moves=False))
NUM_CALLS, PROMPT_LEN, OUTPUT_LEN = 12, 4000, 600


def calls(num_calls: int = NUM_CALLS) -> list[Call]:
    """One session, all of whose outputs are made by one worker: its steps take 53 ms and more then."""
    return [
        Call(
            0.05 * number,
            PROMPT_LEN,
            OUTPUT_LEN,
            np.arange(-(-PROMPT_LEN // BLOCK_TOKENS), dtype=np.uint64) + np.uint64((number + 1) << 20),
            session="one",
        )
        for number in range(num_calls)
    ]


def late(outcome: Outcome) -> int:
    return int((outcome.tpot_s > TPOT_S).sum())


def test_outputs_move_until_their_worker_is_in_time_and_no_further() -> None:
    staying, moving = simulate(STAYING, calls()), simulate(SETUP, calls())
    assert (staying.num_moves, late(staying)) == (0, NUM_CALLS)
    assert set(moving.failure) == {""}
    assert 3 <= moving.num_moves <= NUM_CALLS
    assert moving.tpot_s.max() < 0.7 * staying.tpot_s.min()
    assert moving.virtual_s < 0.75 * staying.virtual_s
    places = np.bincount(moving.decode_id, minlength=3)[1:]
    assert sorted(places) == sorted([moving.num_moves, NUM_CALLS - moving.num_moves]), "each moves once"


def test_where_all_are_in_time_nobody_moves() -> None:
    outcome = simulate(SETUP, calls(5))
    assert (outcome.num_moves, late(outcome)) == (0, 0)


def test_it_is_the_same_again() -> None:
    assert simulate(SETUP, calls()).decisions_digest == simulate(SETUP, calls()).decisions_digest


PREFILL, DECODE = replace(WORKER, role=Role.PREFILL), replace(WORKER, role=Role.DECODE)


@pytest.mark.parametrize("workers", [(WORKER,) * 2, (PREFILL, DECODE, DECODE)], ids=["unified", "decode"])
@pytest.mark.parametrize("moves", [True, False])
def test_a_drain_moves_what_runs_and_does_not_wait_for_it(workers: tuple[WorkerSetup, ...], moves: bool) -> None:
    last = len(workers)
    setup = replace(
        SETUP,
        workers=workers,
        slo=Slo(),
        policy="round_robin",
        router=RouterSetup(moves=moves),
        actions=(Drain(3.0, last, 60.0),),
    )
    platform = Platform(setup)
    served = platform.offer(calls())
    while platform.fleet.members[last].state is not State.GONE:
        assert platform.clock.step()
    left_s = platform.clock.now_s
    while platform.front.num_ended < len(served):
        assert platform.clock.step()
    assert [each.failure for each in served] == [""] * NUM_CALLS
    assert platform.front.num_moves == (6 if moves else 0), "that ran there"
    assert left_s < 4.0 if moves else left_s > 5.0


@pytest.mark.parametrize("worker_id", [1, 2])
@pytest.mark.parametrize("at_s", [1.3, 1.6, 2.0, 2.4])
def test_a_worker_that_dies_meanwhile_costs_no_output(worker_id: int, at_s: float) -> None:
    platform = Platform(replace(SETUP, actions=(Kill(at_s, worker_id),)))
    served = platform.offer(calls())
    while platform.front.num_ended < len(served):
        assert platform.clock.step()
    assert [each.failure for each in served] == [""] * NUM_CALLS
    platform.settle()
    for worker in platform.living:
        held = {state: n for state, n in worker.cache.pool.counts().items() if state not in ("free", "cached") and n}
        assert held == {}
        assert worker.cache.audit(worker.core.report().holders) == []
