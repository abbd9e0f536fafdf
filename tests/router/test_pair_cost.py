"""Tables of clusters against the pair that finishes first. Prefill workers 1 and 2, decode workers 11 and 12."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from diptych.router.estimates import Learned
from diptych.router.fits import Curve, Line
from diptych.router.pairing import partners
from diptych.router.policies.cost import MISS_WEIGHT, QUEUED_MISS_WEIGHT, Cost, cost_of
from diptych.router.policies.pair_cost import pair_cost
from diptych.router.policies.policy import Candidates, RequestView, Worker
from diptych.router.worker_view import Pair, WorkerLoad

SPEED = Learned(prefill=Curve(0.01, 1e-4), decode=Line(0.01, 1e-6))  # 10,000 tokens/s
IDLE = Worker(0, WorkerLoad(num_requests=0, queued_tokens=0, free_tokens=100_000), 0, SPEED, token_bytes=1000)
REQUEST = RequestView(prompt_len=1000, number=0, output_len=10)
SPLIT = [Pair(p, d) for p in (1, 2) for d in (11, 12)]
UNIFIED = [Pair(p, d) for p in (1, 2) for d in (1, 2)]


def among(pairs: Iterable[Pair], workers: Mapping[int, Worker]) -> Candidates:
    """Idle workers, but for those given."""
    by_prefill = partners(pairs)
    ids = {*by_prefill, *(decode_id for ids in by_prefill.values() for decode_id in ids)}
    return Candidates({key: replace(workers.get(key, IDLE), instance_id=key) for key in sorted(ids)}, by_prefill)


def busy(**load: object) -> Worker:
    return replace(IDLE, load=replace(IDLE.load, **load))  # type: ignore[arg-type]


def decoding(num_requests: int) -> Worker:
    """Outputs whose contexts have 1,000 tokens each."""
    return busy(num_requests=num_requests, context_tokens=1000 * num_requests)


def chosen(pairs: Iterable[Pair], **workers: Worker) -> set[Pair]:
    candidates = among(pairs, {int(name[1:]): worker for name, worker in workers.items()})
    return {pair_cost(candidates, replace(REQUEST, number=number)).pair for number in range(8)}


def test_a_cost_is_the_sum_of_what_happens_one_after_the_other() -> None:
    queue = busy(num_queued=2, queued_tokens=500, queued_transfer_bytes=1000, link_speeds={11: 1e6})
    prefill, decode = replace(queue, cached_tokens=400), replace(decoding(4), cached_tokens=100)
    candidates = among([Pair(1, 11), Pair(2, 11)], {1: prefill, 11: decode})
    cost = cost_of(candidates, REQUEST, Pair(1, 11))
    misses = MISS_WEIGHT + QUEUED_MISS_WEIGHT  # one prompt queues in the median: the mean of two and none
    others_lose = 0.07 * (misses - 1) + 0.02
    assert cost == pytest.approx(
        Cost(queue_s=0.07, grant_s=0, compute_s=0.07, transfer_s=0.902, decode_s=0.15, stall_s=others_lose)
    )
    assert cost.ttft_s == pytest.approx(0.14)
    assert cost.total_s == pytest.approx(0.14 + 0.902 + 0.15 + others_lose)
    assert pair_cost(candidates, REQUEST).pair == Pair(2, 11)


def test_pages_are_waited_for_while_the_prompt_queues() -> None:
    assert Cost(queue_s=2, grant_s=3, compute_s=1).ttft_s == 4
    assert Cost(queue_s=3, grant_s=2, compute_s=1).ttft_s == 4


@pytest.mark.parametrize(
    ("workers", "wanted"),
    [
        ({}, set(SPLIT)),
        ({"p1": busy(queued_tokens=1000)}, {Pair(2, 11), Pair(2, 12)}),
        ({"p1": replace(IDLE, cached_tokens=800)}, {Pair(1, 11), Pair(1, 12)}),
        # a queue that costs less than the cache saves all, and one that costs more
        ({"p1": replace(busy(queued_tokens=2200), cached_tokens=800)}, {Pair(1, 11), Pair(1, 12)}),
        ({"p1": replace(busy(queued_tokens=2600), cached_tokens=800)}, {Pair(2, 11), Pair(2, 12)}),
        ({"p2": replace(IDLE, learned=replace(SPEED, prefill=Curve(0.01, 2e-4)))}, {Pair(1, 11), Pair(1, 12)}),
        ({"d11": decoding(5)}, {Pair(1, 12), Pair(2, 12)}),
        ({"d11": busy(has_credit=False), "d12": decoding(20)}, {Pair(1, 12), Pair(2, 12)}),
        ({"d11": busy(free_tokens=999)}, {Pair(1, 12), Pair(2, 12)}),
        ({"d11": busy(has_credit=False), "d12": busy(has_credit=False)}, set(SPLIT)),
        ({"d12": replace(IDLE, cached_tokens=900, token_bytes=10**6)}, set(SPLIT) - {Pair(1, 11), Pair(2, 11)}),
    ],
)
def test_the_pair_that_finishes_first_is_chosen(workers: Mapping[str, Worker], wanted: set[Pair]) -> None:
    heavy = {name: worker for name, worker in workers.items() if worker.token_bytes != 1000}
    others = {f"d{key}": replace(IDLE, token_bytes=10**6) for key in (11, 12)} if heavy else {}
    assert chosen(SPLIT, **{**others, **workers}) == wanted


def test_a_slow_link_is_avoided() -> None:
    slow = busy(link_speeds={11: 1e6, 12: 1e9})
    assert chosen(SPLIT, p1=slow, p2=slow) == {Pair(1, 12), Pair(2, 12)}
    learned = replace(
        slow, learned=replace(SPEED, links={11: Line(0.0, 1e-3), 12: Line(0.0, 1e3)})
    )  # what was seen beats a test
    assert chosen(SPLIT, p1=learned, p2=learned) == {Pair(1, 11), Pair(2, 11)}


def test_equal_pairs_get_equal_shares() -> None:
    counts = Counter(pair_cost(among(SPLIT, {}), replace(REQUEST, number=n)).pair for n in range(40))
    assert counts == dict.fromkeys(SPLIT, 10)


def test_unified_workers_serve_each_other_when_that_is_worth_a_place_in_two_caches() -> None:
    assert chosen(UNIFIED) == {Pair(1, 1), Pair(2, 2)}
    assert chosen(UNIFIED, w1=busy(num_queued=5, queued_tokens=20_000), w2=busy(has_credit=False)) == {Pair(2, 1)}
    assert chosen(UNIFIED, w1=replace(IDLE, cached_tokens=1000), w2=replace(IDLE, cached_tokens=1000)) == {
        Pair(1, 2),
        Pair(2, 1),
    }


def test_a_prompt_is_computed_where_its_output_is_made_if_that_is_cheaper() -> None:
    """Conditional disaggregation: prefill worker 1, unified worker 2."""
    pairs = [Pair(1, 2), Pair(2, 2)]
    link = busy(link_speeds={2: 1e8})
    assert chosen(pairs, p1=link) == {Pair(2, 2)}  # moving 1 MB would take 10 ms
    assert chosen(pairs, p1=link, w2=decoding(5)) == {Pair(1, 2)}  # five others would stall for 0.11 s
    cached = replace(decoding(5), cached_tokens=990)
    assert chosen(pairs, p1=link, w2=cached) == {Pair(2, 2)}  # they stall for ten tokens only
    assert chosen(pairs, p1=busy(link_speeds={2: 1e8}, queued_tokens=20_000), w2=decoding(5)) == {Pair(2, 2)}


def test_a_favourite_keeps_its_prompts_longer_where_all_queue_but_not_because_it_queues_itself() -> None:
    long_queue = busy(num_queued=9, queued_tokens=9000)
    favourite = replace(long_queue, cached_tokens=900)
    pairs = [Pair(p, 11) for p in (1, 2, 3)]
    assert chosen(pairs, p1=favourite) == {Pair(2, 11), Pair(3, 11)}
    queue = busy(num_queued=3, queued_tokens=3000)
    assert chosen(pairs, p1=favourite, p2=queue, p3=queue) == {Pair(1, 11)}


def test_in_a_large_fleet_the_best_workers_are_paired_and_equals_take_turns() -> None:
    pairs = [Pair(p, 100 + d) for p in range(20) for d in range(20)]
    best = {7: replace(IDLE, cached_tokens=900), **{key: decoding(3) for key in range(100, 119)}}
    candidates = among(pairs, best)
    assert {pair_cost(candidates, replace(REQUEST, number=n)).pair for n in range(8)} == {Pair(7, 119)}
    counts = Counter(pair_cost(among(pairs, {}), replace(REQUEST, number=n)).pair.prefill_id for n in range(2000))
    assert set(counts) == set(range(20))
    assert max(counts.values()) < 2 * min(counts.values())


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(4, 16), (16, 16), (32, 32)])
def test_no_worker_of_a_large_idle_fleet_is_left_out_and_hardly_a_pair(num_prefill: int, num_decode: int) -> None:
    fleet = among([Pair(p, 100 + d) for p in range(num_prefill) for d in range(num_decode)], {})
    num_pairs = num_prefill * num_decode
    pairs = Counter(pair_cost(fleet, replace(REQUEST, number=n)).pair for n in range(4 * num_pairs))
    decodes = Counter(pair.decode_id for pair in pairs.elements())
    assert len(decodes) == num_decode
    assert max(decodes.values()) < 1.1 * min(decodes.values())
    assert len(pairs) > 0.95 * num_pairs


@pytest.mark.parametrize("num_prefill", [7, 8, 30])
def test_a_prompt_may_be_computed_where_its_output_is_made_in_a_large_fleet_too(num_prefill: int) -> None:
    """One unified worker, which has an output to make; links that take longer for the KV than it would stand still."""
    slow = {1000: 1e7}
    prefills = {key: busy(link_speeds=slow) for key in range(num_prefill)}
    pairs = [Pair(key, 1000) for key in (*prefills, 1000)]
    candidates = among(pairs, {**prefills, 1000: busy(num_requests=1, context_tokens=1000)})
    assert {pair_cost(candidates, replace(REQUEST, number=n)).pair for n in range(16)} == {Pair(1000, 1000)}


@pytest.mark.parametrize("num_decode", [8, 12, 40])
def test_a_busier_decode_worker_that_has_the_kv_is_found_among_many(num_decode: int) -> None:
    heavy = replace(IDLE, token_bytes=10**6)
    workers = {key: heavy for key in (1, *range(100, 100 + num_decode))}
    workers[103] = replace(decoding(1), token_bytes=10**6, cached_tokens=900)
    candidates = among([Pair(1, key) for key in workers if key != 1], workers)
    assert {pair_cost(candidates, replace(REQUEST, number=n)).pair for n in range(16)} == {Pair(1, 103)}
