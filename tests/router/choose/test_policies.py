from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from diptych.router.choose.pairing import partners
from diptych.router.choose.policies import POLICIES, Plan, plan_of
from diptych.router.choose.policies.policy import Candidates, Policy, RequestView, Worker
from diptych.router.workers.worker_view import Pair, WorkerLoad

IDLE = WorkerLoad(num_requests=0, queued_tokens=0, free_tokens=10_000)


BY_KEY = {"random", "power_of_two", "prefix_hash"}  # their choice depends on draws and prompts, not on turns
TAKING_TURNS = {name: policy for name, policy in POLICIES.items() if name not in BY_KEY}
ROUND_ROBIN, LEAST_LOAD = POLICIES["round_robin"], POLICIES["least_load"]


def among(loads: Mapping[int, WorkerLoad], pairs: Iterable[Pair]) -> Candidates:
    return Candidates({key: Worker(key, load) for key, load in loads.items()}, partners(pairs))


def candidates(**loads: WorkerLoad) -> Candidates:
    """Two prefill and two decode workers: p1, p2, d1, d2; idle unless said otherwise. Ids: 1, 2, 11, 12."""
    load = {"p1": IDLE, "p2": IDLE, "d1": IDLE, "d2": IDLE, **loads}
    by_id = {1: load["p1"], 2: load["p2"], 11: load["d1"], 12: load["d2"]}
    return among(by_id, [Pair(p, d) for p in (1, 2) for d in (11, 12)])


def chosen(policy: Policy, among: Candidates, count: int = 4, prompt_len: int = 100) -> list[Pair]:
    return [policy(among, RequestView(prompt_len, number)).pair for number in range(count)]


@pytest.mark.parametrize("policy", TAKING_TURNS.values(), ids=TAKING_TURNS.keys())
def test_equal_pairs_get_equal_shares(policy: Policy) -> None:
    assert Counter(chosen(policy, candidates(), 40)) == dict.fromkeys(candidates().pairs(), 10)


def test_round_robin_spreads_neighbours_over_prefill_workers() -> None:
    assert chosen(ROUND_ROBIN, candidates()) == [Pair(1, 11), Pair(2, 11), Pair(1, 12), Pair(2, 12)]


def test_round_robin_knows_that_workers_have_different_partners() -> None:
    partial = among(dict.fromkeys((1, 2, 11, 12), IDLE), [Pair(1, 11), Pair(2, 11), Pair(2, 12)])
    assert chosen(ROUND_ROBIN, partial) == [Pair(1, 11), Pair(2, 11), Pair(1, 11), Pair(2, 12)]


def test_least_load_takes_the_shorter_prefill_queue_and_the_emptier_decode_worker() -> None:
    busy = candidates(p1=IDLE._replace(queued_tokens=500), d2=IDLE._replace(num_requests=3))
    assert set(chosen(LEAST_LOAD, busy)) == {Pair(2, 11)}


def test_least_load_avoids_a_decode_worker_without_memory_for_the_prompt() -> None:
    full = candidates(d1=IDLE._replace(free_tokens=99), d2=IDLE._replace(num_requests=50))
    assert {pair.decode_id for pair in chosen(LEAST_LOAD, full, prompt_len=100)} == {12}
    assert {pair.decode_id for pair in chosen(LEAST_LOAD, full, prompt_len=99)} == {11}


def test_least_load_uses_a_full_decode_worker_if_there_is_no_other() -> None:
    full = IDLE._replace(free_tokens=0)
    assert len(set(chosen(LEAST_LOAD, candidates(d1=full, d2=full)))) == 4


def test_least_load_avoids_a_decode_worker_where_requests_wait_for_pages() -> None:
    waiting = candidates(d1=IDLE._replace(has_credit=False), d2=IDLE._replace(free_tokens=99, num_requests=50))
    assert {pair.decode_id for pair in chosen(LEAST_LOAD, waiting, prompt_len=100)} == {12}
    without = IDLE._replace(has_credit=False)
    assert len(set(chosen(LEAST_LOAD, candidates(d1=without, d2=without)))) == 4


def unified(u1: WorkerLoad = IDLE, u2: WorkerLoad = IDLE) -> Candidates:
    """Two unified workers, each also alone."""
    return among({1: u1, 2: u2}, [Pair(p, d) for p in (1, 2) for d in (1, 2)])


@pytest.mark.parametrize(
    "name", sorted(TAKING_TURNS.keys() - {"adaptive", "pair_cost"})
)  # these count what the other's cache loses
def test_equal_unified_workers_serve_each_other(name: str) -> None:
    policy = TAKING_TURNS[name]
    assert Counter(chosen(policy, unified(), 40)) == {Pair(1, 2): 20, Pair(2, 1): 20}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_unified_worker_without_a_partner_serves_alone(policy: Policy) -> None:
    assert set(chosen(policy, among({1: IDLE}, [Pair(1, 1)]))) == {Pair(1, 1)}


@pytest.mark.parametrize(
    ("busy", "wanted"),
    [
        (IDLE._replace(queued_tokens=500), {Pair(2, 1)}),  # it can still decode
        (IDLE._replace(num_requests=3), {Pair(2, 2)}),
        (IDLE._replace(has_credit=False), {Pair(1, 2)}),
        (IDLE._replace(free_tokens=99), {Pair(1, 2)}),
        (IDLE._replace(queued_tokens=500, num_requests=3), {Pair(2, 2)}),
    ],
)
def test_least_load_takes_a_unified_worker_alone_where_that_is_least(busy: WorkerLoad, wanted: set[Pair]) -> None:
    assert set(chosen(LEAST_LOAD, unified(u1=busy))) == wanted


def test_round_robin_uses_a_unified_worker_alone_on_its_turn_if_nobody_decodes_for_it() -> None:
    pairs = [Pair(1, 9), Pair(9, 9)]
    assert chosen(ROUND_ROBIN, among({1: IDLE, 9: IDLE}, pairs)) == [*pairs, *pairs]


def test_each_role_may_have_a_policy_of_its_own() -> None:
    busy = candidates(p1=IDLE._replace(queued_tokens=500), d1=IDLE._replace(num_requests=3))
    assert chosen(plan_of("round_robin", decode="least_load").choose, busy) == [Pair(1, 12), Pair(2, 12)] * 2
    assert chosen(plan_of("round_robin", prefill="least_load").choose, busy) == [Pair(2, 11)] * 2 + [Pair(2, 12)] * 2


@pytest.mark.parametrize(
    ("plan", "name", "reads_prompt"),
    [
        (plan_of("pair_cost"), "pair_cost", True),
        (plan_of("least_load"), "least_load", False),
        (plan_of("least_load", prefill="cache_aware"), "cache_aware+least_load", True),
        (plan_of("pair_cost", "random", "round_robin"), "random+round_robin", False),
    ],
)
def test_a_plan_says_whether_prompts_are_looked_up(plan: Plan, name: str, reads_prompt: bool) -> None:
    assert (plan.name, plan.reads_prompt) == (name, reads_prompt)


def test_pair_cost_may_choose_for_one_role() -> None:
    busy = candidates(p1=IDLE._replace(queued_tokens=500), d1=IDLE._replace(has_credit=False))
    assert {pair.prefill_id for pair in chosen(plan_of("round_robin", prefill="pair_cost").choose, busy)} == {2}
    assert {pair.decode_id for pair in chosen(plan_of("round_robin", decode="pair_cost").choose, busy)} == {12}
