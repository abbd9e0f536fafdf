"""Whom the adaptive policy chooses: tables of two workers that may do anything, and an SLO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from diptych.generation.slo import Slo
from diptych.router.choose.estimates import RecentMeans
from diptych.router.choose.policies.adaptive import adaptive, first_s
from diptych.router.choose.policies.beside import share_of, slowed_s, step_s
from diptych.router.choose.policies.missing import missed
from diptych.router.choose.policies.pair_cost import pair_cost
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker
from diptych.router.choose.stakes import urgency
from diptych.router.workers.worker_view import Pair, WorkerLoad

IDLE = WorkerLoad(0, 0, 1_000_000, output_step_s=0.004, context_token_s=0.034e-6, prompt_token_s=25e-6)
SLO = Slo(0.3, 0.010)
REQUEST = RequestView(2000, 0, output_len=500, slo=SLO)
COMING = RecentMeans(busy=0.7, prompt_s=0.1, found=0.0, rate=7.0)
BUSY = replace(REQUEST, usual=COMING)


def making(num_outputs: int, context: int, budget: int = 0, **fields: Any) -> WorkerLoad:
    """A worker with outputs of so much context each."""
    tokens = num_outputs * context
    return IDLE._replace(
        num_requests=num_outputs, num_outputs=num_outputs, output_tokens=tokens, prompt_budget=budget, **fields
    )


def computing(num_prompts: int, num_tokens: int) -> WorkerLoad:
    tokens = num_prompts * num_tokens
    return IDLE._replace(num_requests=num_prompts, num_queued=num_prompts, queued_tokens=tokens, left_tokens=tokens)


def chosen(loads: Mapping[int, WorkerLoad], request: RequestView = REQUEST) -> Pair:
    workers = {key: Worker(key, load) for key, load in loads.items()}
    partners: dict[int, Sequence[int]] = {key: tuple(loads) for key in loads}
    return adaptive(Candidates(workers, partners), request).pair


def test_outputs_are_packed_and_prompts_go_where_there_are_none() -> None:
    assert chosen({1: IDLE, 2: IDLE}, BUSY) == Pair(1, 1)
    assert chosen({1: making(10, 2500), 2: IDLE}, BUSY) == Pair(2, 1)
    assert chosen({1: IDLE, 2: making(10, 2500)}, BUSY) == Pair(1, 2)


def test_outputs_are_spread_where_no_prompts_need_a_worker() -> None:
    assert chosen({1: making(10, 2500), 2: IDLE}) == Pair(2, 2)


@pytest.mark.parametrize(("num_outputs", "decode_id"), [(20, 1), (30, 1), (55, 2), (70, 2)])
def test_another_worker_makes_outputs_where_the_busiest_has_less_to_do_then(num_outputs: int, decode_id: int) -> None:
    assert chosen({1: making(num_outputs, 2500), 2: IDLE}, BUSY).decode_id == decode_id


def test_a_prompt_delays_no_outputs_where_either_worker_has_its_first_token_in_time() -> None:
    """The first has slack for it, and would have it sooner: the other has another one to compute."""
    loads = {1: making(20, 4000, budget=6000), 2: computing(1, 4000)}
    assert chosen(loads, replace(BUSY, prompt_len=4000, slo=Slo(1.0, 0.010))) == Pair(2, 1)
    assert chosen(loads, replace(BUSY, prompt_len=4000, slo=Slo(0.19, 0.010))) == Pair(1, 1), "it would be late there"


def test_prompts_are_computed_with_their_outputs_where_all_workers_make_some() -> None:
    """Else they would be in steps of their own, and the weights read once more."""
    loads = {1: making(30, 2500, budget=4000), 2: making(31, 2500, budget=4000)}
    assert chosen(loads, replace(BUSY, output_len=1000)).is_local


def test_who_has_measured_nothing_yet_is_as_fast_as_the_others() -> None:
    unknown = IDLE._replace(output_step_s=0.0, context_token_s=0.0, prompt_token_s=0.0)
    assert chosen({1: making(10, 2500), 2: unknown}, BUSY) == Pair(2, 1)
    assert chosen({1: unknown, 2: unknown}, BUSY) == Pair(1, 1)


def test_long_prompts_that_can_wait_leave_a_worker_to_those_that_can_not() -> None:
    usual = RecentMeans(busy=0.5, prompt_s=0.02, found=0.0, rate=6.0, urgency=urgency(Slo(0.06, 0.02)))
    loads, batch = {1: computing(1, 16_000), 2: IDLE}, Slo(20.0, 0.05)
    request = replace(REQUEST, prompt_len=16_000, usual=usual, slo=batch)
    assert chosen(loads, request).prefill_id == 1
    assert chosen(loads, replace(request, usual=usual._replace(urgency=urgency(batch)))).prefill_id == 2, "all can wait"
    assert chosen(loads, replace(request, prompt_len=400, slo=Slo(0.06, 0.02))).prefill_id == 2


def test_a_prompt_that_would_be_late_is_computed_where_outputs_can_wait_for_it() -> None:
    """The first has no slack, but outputs that will soon have some again; the second a queue."""
    loads = {1: making(5, 2500), 2: computing(3, 4000)}
    assert chosen(loads, replace(BUSY, prompt_len=4000, slo=Slo(0.15, 0.010))).prefill_id == 1
    assert chosen({**loads, 1: making(60, 2500)}, replace(BUSY, prompt_len=4000, slo=Slo(0.15, 0.010))).prefill_id == 2


def test_a_worker_that_prompts_need_gets_no_output_even_if_another_has_too_much() -> None:
    """A step of the first takes a little too long; the second would have half of its time for prompts that come."""
    loads = {1: making(28, 5800), 2: IDLE}
    assert chosen(loads, replace(REQUEST, usual=COMING, prompt_len=4000)).decode_id == 1
    assert chosen(loads, replace(REQUEST, usual=COMING, slo=Slo(5.0, 0.010), prompt_len=500)).decode_id == 2


def test_a_prompt_goes_where_its_first_token_is_soonest_by_who_runs_not_only_who_waits() -> None:
    """Neither has a queue: the second is full of outputs."""
    assert chosen({1: making(5, 1000), 2: making(50, 2500)}).prefill_id == 1
    assert chosen({1: making(20, 2000), 2: computing(1, 1000)}).prefill_id == 2
    assert chosen({1: making(20, 2000, budget=4000), 2: computing(4, 4000)}).prefill_id == 1, "slack is spent at once"


def test_short_prompts_are_computed_where_their_output_is_made() -> None:
    loads = {1: making(20, 2000, budget=256), 2: computing(2, 8000)}
    assert chosen(loads, replace(REQUEST, prompt_len=128)) == Pair(1, 1)
    assert chosen(loads, replace(REQUEST, prompt_len=100_000, slo=Slo(9.0, 0.010))).prefill_id == 2


@pytest.mark.parametrize("short", [{"has_credit": False}, {"free_tokens": 4000}])
def test_a_worker_without_memory_for_the_growth_of_its_outputs_gets_no_more(short: dict[str, Any]) -> None:
    assert chosen({1: making(10, 2500)._replace(**short), 2: IDLE}).decode_id == 2


@pytest.mark.parametrize("slo", [Slo(), Slo(1.0, 0.0), Slo(0.0, 0.1)])
def test_without_both_times_pair_cost_chooses(slo: Slo) -> None:
    workers = {key: Worker(key, making(key, 1000)) for key in (1, 2)}
    candidates = Candidates(workers, {1: (1, 2), 2: (1, 2)})
    for number in range(4):
        request = replace(REQUEST, slo=slo, number=number)
        assert adaptive(candidates, request).pair == pair_cost(candidates, request).pair


def test_only_the_soonest_of_many_workers_are_paired_and_the_rest_may_serve_alone() -> None:
    loads = {key: computing(key % 7, 1000) for key in range(1, 65)}
    assert chosen(loads, replace(REQUEST, prompt_len=100)).prefill_id % 7 == 0


def test_a_share_of_an_slo_is_missed_more_likely_the_larger_it_is() -> None:
    shares = [missed(share) for share in (0.0, 0.8, 0.95, 1.0, 1.05, 1.2, 3.0)]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0]
    assert shares[3] == pytest.approx(0.5)
    assert 1.0 < shares[-1] < 1.3


def test_prompts_beside_outputs_spend_their_slack_and_then_have_what_steps_leave() -> None:
    worker = Worker(1, making(20, 2000, budget=1000))
    share = share_of(worker, 0.010)
    assert share == pytest.approx(1 - step_s(worker) / 0.010)
    assert slowed_s(worker, 0.02, 0.010) == 0.02
    assert slowed_s(worker, 0.125, 0.010) == pytest.approx(0.025 + 0.1 / share)
    assert slowed_s(worker, 0.125, 0.0) == pytest.approx(0.025 + 0.1 * (0.025 + step_s(worker)) / 0.025)
    assert slowed_s(Worker(1, IDLE), 0.125, 0.010) == 0.125
    assert first_s(Worker(1, computing(2, 1000)), REQUEST) == pytest.approx(4000 * 25e-6)
    assert math.isfinite(slowed_s(Worker(1, making(500, 9000)), 1.0, 0.010)), "no prompt starves"
