"""Scores of one role's workers, lowest wins: tables of loads and caches against whom they name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker, WorkerPolicy
from diptych.router.choose.policies.worker_policies import (
    at_random,
    cache_aware,
    consistent_hash,
    power_of_two,
    prefix_hash,
)
from diptych.router.workers.worker_view import WorkerLoad

PREFILL, DECODE = LegKind.PREFILL, LegKind.DECODE
IDLE = WorkerLoad(num_requests=0, queued_tokens=0, free_tokens=1_000_000)
REQUEST = RequestView(prompt_len=1000, number=0)


def workers(*loads: WorkerLoad, cached: Sequence[int] = ()) -> list[Worker]:
    """Workers with ids from 100 on."""
    return [Worker(100 + i, load, cached[i] if cached else 0) for i, load in enumerate(loads)]


def queues(*tokens: int) -> list[WorkerLoad]:
    return [IDLE._replace(queued_tokens=count) for count in tokens]


def winner(
    policy: WorkerPolicy, among: Sequence[Worker], request: RequestView = REQUEST, kind: LegKind = PREFILL
) -> int:
    scores = policy(among, request, kind)
    assert len(scores) == len(among)
    return min(range(len(scores)), key=scores.__getitem__)


def draws(count: int) -> list[RequestView]:
    rng = random.Random(7)
    return [RequestView(1000, n, rng.getrandbits(64), f"user {n}", rng.getrandbits(64)) for n in range(count)]


@pytest.mark.parametrize("policy", [at_random, consistent_hash, prefix_hash])
def test_draws_and_keys_fall_evenly(policy: WorkerPolicy) -> None:
    counts = Counter(winner(policy, workers(*[IDLE] * 4), request) for request in draws(4000))
    assert all(900 < counts[index] < 1100 for index in range(4)), counts


def test_power_of_two_takes_the_less_busy_of_two_and_never_the_busiest() -> None:
    counts = Counter(winner(power_of_two, workers(*queues(0, 10, 20, 30)), request) for request in draws(6000))
    shares = [counts[index] / 6000 for index in range(4)]
    assert shares == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0], abs=0.03)


def test_power_of_two_weighs_decode_workers_by_their_requests_and_room() -> None:
    among = workers(IDLE._replace(num_requests=3), IDLE._replace(has_credit=False))
    assert [winner(power_of_two, among, request, DECODE) for request in draws(5)] == [0] * 5
    among = workers(IDLE._replace(free_tokens=999), IDLE._replace(num_requests=9))
    assert [winner(power_of_two, among, request, DECODE) for request in draws(5)] == [1] * 5


def test_a_session_stays_at_its_worker_when_another_leaves() -> None:
    before = workers(*[IDLE] * 4)
    for request in draws(50):
        home = winner(consistent_hash, before, request)
        busy = [w._replace(load=IDLE._replace(queued_tokens=10**6)) if i == home else w for i, w in enumerate(before)]
        assert winner(consistent_hash, busy, request) == home
        other = (home + 1) % 4
        after = [worker for index, worker in enumerate(before) if index != other]
        assert after[winner(consistent_hash, after, request)] is before[home]


def test_requests_without_a_session_are_equal() -> None:
    assert consistent_hash(workers(*queues(5, 0)), REQUEST, PREFILL) == [0.0, 0.0]


def test_prompts_that_begin_alike_share_a_worker_until_it_has_more_than_its_share() -> None:
    request = replace(REQUEST, prefix_key=1234)
    home = winner(prefix_hash, workers(*[IDLE] * 4), request)
    loads = [0, 0, 0, 0]
    loads[home] = 8000
    assert winner(prefix_hash, workers(*queues(*loads)), request) == home
    loads[home] = 40_000
    second = winner(prefix_hash, workers(*queues(*loads)), request)
    assert second != home
    loads[second] = 40_000
    assert winner(prefix_hash, workers(*queues(*loads)), request) not in (home, second)
    loads = [40_000] * 4  # everybody is as busy
    assert winner(prefix_hash, workers(*queues(*loads)), request) == home


@pytest.mark.parametrize(
    ("cached", "queued", "wanted"),
    [
        ((0, 0, 0), (5, 0, 9), 1),  # nobody knows it: the least busy
        ((500, 900, 800), (0, 4000, 0), 1),  # most of the prompt
        ((500, 900, 800), (0, 400_000, 0), 2),  # the favourite has more than its share: the next that has it
        ((0, 900, 0), (7, 400_000, 3), 2),  # nobody else has it
        ((50, 0, 0), (9, 8, 7), 2),  # too little to be worth it
        ((900, 900, 0), (0, 0, 0), 0),
    ],
)
def test_cache_aware(cached: Sequence[int], queued: Sequence[int], wanted: int) -> None:
    assert winner(cache_aware, workers(*queues(*queued), cached=cached)) == wanted


@pytest.mark.parametrize("prompt_len", [50_000, 100_000, 400_000])
def test_cache_aware_counts_what_a_worker_would_compute_and_not_the_whole_prompt(prompt_len: int) -> None:
    among = workers(*[IDLE] * 8, cached=(0, 0, 0, prompt_len - 10, 0, 0, 0, 0))
    request = RequestView(prompt_len, 0)
    assert winner(cache_aware, among, request) == 3


def test_draws_for_the_two_roles_are_unrelated() -> None:
    both = workers(*[IDLE] * 4)
    same = sum(winner(at_random, both, request) == winner(at_random, both, request, DECODE) for request in draws(4000))
    assert 900 < same < 1100


def test_cache_aware_avoids_a_decode_worker_that_has_no_room() -> None:
    among = workers(IDLE._replace(has_credit=False), IDLE._replace(num_requests=3), cached=(900, 0))
    assert winner(cache_aware, among, kind=DECODE) == 1
