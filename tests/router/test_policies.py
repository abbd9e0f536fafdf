from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diptych.router.policies import POLICIES
from diptych.router.policies.least_load import least_load
from diptych.router.policies.policy import Candidate, Policy, RequestView
from diptych.router.policies.round_robin import round_robin
from diptych.router.worker_view import Pair, WorkerLoad

IDLE = WorkerLoad(num_requests=0, queued_tokens=0, free_tokens=10_000)


def candidates(**loads: WorkerLoad) -> list[Candidate]:
    """Two prefill and two decode workers: p1, p2, d1, d2; idle unless said otherwise."""
    load = {"p1": IDLE, "p2": IDLE, "d1": IDLE, "d2": IDLE, **loads}
    return [Candidate(Pair(p, 10 + d), load[f"p{p}"], load[f"d{d}"]) for p in (1, 2) for d in (1, 2)]


def chosen(policy: Policy, among: list[Candidate], count: int = 4, prompt_len: int = 100) -> list[Pair]:
    return [policy(among, RequestView(prompt_len, number)) for number in range(count)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_equal_pairs_get_equal_shares(policy: Policy) -> None:
    assert Counter(chosen(policy, candidates(), 40)) == {candidate.pair: 10 for candidate in candidates()}


def test_round_robin_spreads_neighbours_over_prefill_workers() -> None:
    assert chosen(round_robin, candidates()) == [Pair(1, 11), Pair(2, 11), Pair(1, 12), Pair(2, 12)]


def test_round_robin_knows_that_workers_have_different_partners() -> None:
    partial = [candidate for candidate in candidates() if candidate.pair != Pair(1, 12)]
    assert chosen(round_robin, partial) == [Pair(1, 11), Pair(2, 11), Pair(1, 11), Pair(2, 12)]


def test_least_load_takes_the_shorter_prefill_queue_and_the_emptier_decode_worker() -> None:
    busy = candidates(p1=replace(IDLE, queued_tokens=500), d2=replace(IDLE, num_requests=3))
    assert set(chosen(least_load, busy)) == {Pair(2, 11)}


def test_least_load_avoids_a_decode_worker_without_memory_for_the_prompt() -> None:
    full = candidates(d1=replace(IDLE, free_tokens=99), d2=replace(IDLE, num_requests=50))
    assert {pair.decode_id for pair in chosen(least_load, full, prompt_len=100)} == {12}
    assert {pair.decode_id for pair in chosen(least_load, full, prompt_len=99)} == {11}


def test_least_load_uses_a_full_decode_worker_if_there_is_no_other() -> None:
    full = replace(IDLE, free_tokens=0)
    assert len(set(chosen(least_load, candidates(d1=full, d2=full)))) == 4


def test_least_load_avoids_a_decode_worker_where_requests_wait_for_pages() -> None:
    waiting = candidates(d1=replace(IDLE, has_credit=False), d2=replace(IDLE, free_tokens=99, num_requests=50))
    assert {pair.decode_id for pair in chosen(least_load, waiting, prompt_len=100)} == {12}
    without = replace(IDLE, has_credit=False)
    assert len(set(chosen(least_load, candidates(d1=without, d2=without)))) == 4
