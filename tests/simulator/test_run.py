"""A platform in virtual time: deterministic, loses nothing, and takes as long as can be told by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import STEPS, call, chats, platform
from simulated import worker as new_worker

from diptych.common.errors import ConfigError
from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.batch import StepResult
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.step_model import StepShape
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo
from diptych.simulator import worker as worker_module
from diptych.simulator.outcome import Outcome
from diptych.simulator.prompts import prompt_of
from diptych.simulator.run import Platform, simulate
from diptych.simulator.setup import VOCAB_SIZE, Delays, Drain, Flip, Kill, Setup
from diptych.simulator.setup import Start as StartWorker
from diptych.simulator.traces.call import Call
from diptych.unified.core import UnifiedCore

FLEETS = ["U", "UU", "PD", "PPDD", "PUD"]


def equal(one: Outcome, other: Outcome) -> bool:
    arrays = ("first_s", "last_s", "prefill_id", "decode_id", "cached_len")
    same = all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in arrays)
    return same and (one.failure, one.decisions_digest) == (other.failure, other.decisions_digest)


def run_to_rest(setup: Setup, calls: list[Call]) -> tuple[Platform, list[str]]:
    """Return a platform that has come to rest, and how calls failed."""
    made = Platform(setup)
    served = made.offer(calls)
    while made.front.num_ended < len(served):
        made.clock.step()
    made.settle()
    return made, [each.failure for each in served]


def check_clean(made: Platform) -> None:
    for worker in made.living:
        assert worker.num_open_rooms == 0
        assert worker.cache.num_available == worker.cache.pool.capacity
        assert worker.cache.audit(worker.core.report().holders) == []


@pytest.mark.parametrize("policy", ["pair_cost", "random"])
def test_the_same_setup_calls_and_seed_give_the_same_to_the_byte(policy: str) -> None:
    setup, calls = platform("PUD", policy=policy, seed=7), chats(30)
    assert equal(simulate(setup, calls), simulate(setup, calls))


def test_another_seed_draws_others() -> None:
    digests = {simulate(platform("UUU", policy="random", seed=seed), chats(30)).decisions_digest for seed in (1, 2)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("roles", "policy"), [("U", "pair_cost"), ("UU", "adaptive"), ("PPDD", "pair_cost"), ("PUD", "adaptive")]
)
def test_steps_that_are_passed_together_change_nothing(
    roles: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = platform(roles, policy=policy, worker_changes={"num_pages": 601}, slo=Slo(0.3, 0.02))
    calls = chats(40, apart_s=0.15)
    together = simulate(setup, calls)
    monkeypatch.setattr(worker_module, "MIN_STRETCH", 1 << 60)
    one_by_one = simulate(setup, calls)
    assert equal(together, one_by_one)
    assert together.num_steps == one_by_one.num_steps


@pytest.mark.parametrize(("roles", "overlap"), [*((roles, True) for roles in FLEETS), ("U", False), ("PUD", False)])
def test_every_call_is_served_and_every_page_comes_back(roles: str, overlap: bool) -> None:
    changes = {"num_pages": 521, "overlap": overlap}
    setup = platform(roles, worker_changes=changes, transfer=TransferRules(num_windows=4))
    made, failures = run_to_rest(setup, chats(50, apart_s=0.02))
    assert set(failures) == {""}
    check_clean(made)


def test_a_platform_that_is_asked_too_much_refuses_and_counts_it() -> None:
    setup = platform("U", worker_changes={"step_model": STEPS, "max_requests": 2})
    limits = setup.router.limits.__class__(max_running=4, max_waiting=4, max_wait_s=0.5)
    setup = platform("U", router=setup.router.__class__(limits=limits))
    outcome = simulate(setup, chats(40, apart_s=0.001))
    assert len(outcome.failure) == 40
    refused = np.array([bool(each) for each in outcome.failure])
    assert 0 < refused.sum() < 40
    assert np.array_equal(refused, ~outcome.is_served)


@pytest.mark.parametrize(("roles", "num_at_once"), [("U", 4), ("UU", 8), ("PD", 4)])
def test_as_many_requests_run_at_once_behind_a_router_as_the_workers_may_take(roles: str, num_at_once: int) -> None:
    setup = platform(roles, policy="least_load", worker_changes={"max_requests": 4})
    outcome = simulate(setup, [call(1.0, 100, 200, number) for number in range(num_at_once + 1)])
    waited = np.sort(outcome.first_s) > outcome.last_s.min()
    assert waited.tolist() == [False] * num_at_once + [True]


@pytest.mark.parametrize(
    ("roles", "num_windows", "first_s", "last_s"),
    [
        ("U", 1, 0.028, 0.072),  # 1 to the worker, 26 for the prompt, 1 back; 4 steps of 11
        ("PD", 1, 0.0281, 0.0738),  # a note before; 1.6 of pages and a note behind the prompt
        ("PD", 4, 0.0281, 0.0726),  # a quarter of the pages behind it
    ],
)
def test_an_idle_platform_takes_as_long_as_its_parts(
    roles: str, num_windows: int, first_s: float, last_s: float
) -> None:
    transfer = TransferRules(integrity="off", num_windows=num_windows)
    outcome = simulate(platform(roles, transfer=transfer), [call(2.0, 1600, 5)])
    assert outcome.first_s[0] - 2 == pytest.approx(first_s, abs=1e-9)
    assert outcome.last_s[0] - 2 == pytest.approx(last_s, abs=1e-9)
    assert outcome.moved_bytes == (1_600_000 if roles == "PD" else 0)


@pytest.mark.parametrize("roles", ["U", "PD"])
def test_with_overlap_steps_follow_each_other_without_a_gap_and_a_prompt_waits_for_one_more(roles: str) -> None:
    calls = [call(1.0, 1600, 100), call(1.5, 800, 2, 7, 8)]
    apart, overlapped = (
        simulate(platform(roles, worker_changes={"overlap": overlap}), calls) for overlap in (False, True)
    )
    assert overlapped.last_s[0] == pytest.approx(apart.last_s[0], abs=0.020)
    assert apart.failure == overlapped.failure == ("", "")
    later_s = overlapped.first_s[1] - apart.first_s[1]
    assert later_s == pytest.approx(0.011 if roles == "U" else 0.0, abs=1e-3)  # a step of one request


def test_a_worker_that_serves_alone_is_the_core_stepped_by_hand() -> None:
    calls = chats(50, apart_s=0.2)
    setup = platform("U", delays=Delays(leg_s=0.0))
    outcome, (first, last) = simulate(setup, calls), stepped_by_hand(calls)
    assert outcome.first_s.tolist() == first
    assert outcome.last_s.tolist() == last


def stepped_by_hand(calls: list[Call]) -> tuple[list[float], list[float]]:
    cache = KvCache(num_pages=2001, page_size=16, max_requests=256, max_tokens_per_request=8192)
    limits = Limits(8192, VOCAB_SIZE, frozenset(), 8192, 256, mixed_step_s=0.1)
    core = UnifiedCore(cache, limits, TransferRules("off"), 16_000, Role.UNIFIED)
    times: list[list[float]] = [[] for _ in calls]
    now_s, coming = 0.0, list(enumerate(calls))
    while coming or core.report().num_open_rooms:
        while coming and coming[0][1].arrival_s <= now_s:
            number, one = coming.pop(0)
            params = SamplingParams(max_tokens=one.output_len, temperature=0.0, ignore_eos=True)
            core.handle(Start(new_request(number + 1, prompt_of(one, number).ids, params), 0, LegKind.LOCAL), now_s)
        batch = core.plan(now_s)
        if batch is None:
            now_s = coming[0][1].arrival_s
            continue
        now_s += STEPS.seconds(StepShape.of(batch))
        core.commit(StepResult(np.ones(batch.num_samples, np.int64)), now_s)
        for effect in core.pop_effects():
            outputs = (effect.output,) if isinstance(effect, Emit) else ()
            for output in effect.outputs() if isinstance(effect, EmitTokens) else outputs:
                times[output.room - 1].append(now_s)
    return [each[0] for each in times], [each[-1] for each in times]


@pytest.mark.parametrize(
    ("roles", "action"),
    [
        ("UU", Drain(1.0, 1, within_s=0.2)),
        ("PPDD", Drain(1.0, 1, within_s=0.2)),
        ("PPDD", Drain(1.0, 3, within_s=0.2)),
        ("UU", Kill(1.0, 2)),
        ("PPDD", Kill(1.0, 2)),
        ("PPDD", Kill(1.0, 4)),
        ("PPPD", Flip(1.0, 1, Role.DECODE)),
        ("PUDD", Flip(1.0, 4, Role.PREFILL, within_s=0.1)),
        ("UU", StartWorker(1.0, new_worker("U", start_s=0.5))),
    ],
    ids=str,
)
def test_nothing_is_lost_when_a_worker_comes_goes_dies_or_changes(roles: str, action: Any) -> None:
    made, failures = run_to_rest(platform(roles, actions=(action,)), chats(60, apart_s=0.03))
    assert set(failures) == {""}
    check_clean(made)
    assert made.fleet.num_flips == isinstance(action, Flip)
    if isinstance(action, Drain | Kill):
        assert action.worker_id not in made.fleet.living
        assert made.fleet.gpu_s() < len(roles) * made.clock.now_s - 1
    if isinstance(action, StartWorker):
        assert len(made.fleet.living) == 3


def test_a_worker_that_is_drained_before_it_has_loaded_never_comes() -> None:
    actions = (StartWorker(0.5, new_worker("U", start_s=5.0)), Drain(1.0, 2))
    made, failures = run_to_rest(platform("U", actions=actions), chats(100, apart_s=0.1))
    assert set(failures) == {""}
    assert list(made.fleet.living) == [1]
    assert made.fleet.gpu_s() == pytest.approx(made.clock.now_s + 0.5)


def test_nobody_who_calls_is_an_outcome_too() -> None:
    assert simulate(platform("U"), []).failure == ()


def test_what_a_worker_has_cached_is_found_again() -> None:
    outcome = simulate(platform("UU"), [call(0.0, 2000, 5, 1, 2, 3, 4), call(1.0, 2048, 5, 1, 2, 3, 4)])
    assert outcome.cached_len.tolist() == [0, 2000]
    assert outcome.prefill_id[0] == outcome.prefill_id[1]


def test_a_platform_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no policy 'luck'"):
        simulate(platform("U", policy="luck"), [])
    with pytest.raises(ConfigError, match="a worker at least"):
        simulate(platform(""), [])


def test_an_output_that_a_small_pool_cuts_short_was_not_served() -> None:
    outcome = simulate(platform("U", worker_changes={"num_pages": 101}), [call(0.0, 100, 5000), call(0.1, 100, 50)])
    assert outcome.failure[0].startswith("cut: its workers' KV pools hold no request of 5100 tokens")
    assert outcome.failure[1] == ""
    assert list(outcome.is_served) == [False, True]


def test_who_comes_for_the_only_worker_serves_alone_when_that_has_gone() -> None:
    actions = (StartWorker(1.0, new_worker("U")), Drain(1.5, 1, within_s=0.5))
    outcome = simulate(platform("U", actions=actions), chats(60, apart_s=0.1))
    assert set(outcome.failure) == {""}
    assert outcome.decode_id[-1] == 2
