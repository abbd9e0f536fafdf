"""Tables of clusters against the pair that finishes first. Prefill workers 1 and 2, decode workers 11 and 12."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.estimates import RecentMeans, WorkerSpeed
from diptych.router.choose.fits import Curve, Line
from diptych.router.choose.pairing import partners
from diptych.router.choose.policies.beginning import computed_s
from diptych.router.choose.policies.cost import Cost, costs_of, later_of, prefill_cost, ttft_s
from diptych.router.choose.policies.pair_cost import pair_cost
from diptych.router.choose.policies.policy import Candidates, HeldPrefix, RequestView, TierLoad, Worker
from diptych.router.choose.stakes import urgency
from diptych.router.workers.worker_view import Pair, WorkerLoad

SPEED = WorkerSpeed(prefill=Curve(0.01, 1e-4), decode=Line(0.01, 1e-6))  # 10,000 tokens/s
IDLE = Worker(0, WorkerLoad(num_requests=0, queued_tokens=0, free_tokens=100_000), 0, SPEED, token_bytes=1000)
REQUEST = RequestView(prompt_len=1000, number=0, output_len=10)
CROWDED = RecentMeans(busy=0.8, prompt_s=0.1)
SPLIT = [Pair(p, d) for p in (1, 2) for d in (11, 12)]
UNIFIED = [Pair(p, d) for p in (1, 2) for d in (1, 2)]


def among(pairs: Iterable[Pair], workers: Mapping[int, Worker]) -> Candidates:
    """Idle workers, but for those given."""
    by_prefill = partners(pairs)
    ids = {*by_prefill, *(decode_id for ids in by_prefill.values() for decode_id in ids)}
    return Candidates({key: workers.get(key, IDLE)._replace(instance_id=key) for key in sorted(ids)}, by_prefill)


def busy(**load: object) -> Worker:
    return IDLE._replace(load=IDLE.load._replace(**load))  # type: ignore[arg-type]


def decoding(num_requests: int) -> Worker:
    """Outputs whose contexts have 1,000 tokens each."""
    return busy(num_requests=num_requests, context_tokens=1000 * num_requests)


def chosen(pairs: Iterable[Pair], usual: RecentMeans = REQUEST.usual, **workers: Worker) -> set[Pair]:
    return chosen_for(replace(REQUEST, usual=usual), pairs, **workers)


def chosen_for(request: RequestView, pairs: Iterable[Pair], **workers: Worker) -> set[Pair]:
    candidates = among(pairs, {int(name[1:]): worker for name, worker in workers.items()})
    return {pair_cost(candidates, replace(request, number=number)).pair for number in range(8)}


def test_a_cost_is_the_sum_of_what_happens_one_after_the_other() -> None:
    queue = busy(num_queued=2, queued_tokens=500, queued_transfer_bytes=1000, link_speeds={11: 1e6})
    prefill, decode = queue._replace(cached_tokens=400), decoding(4)._replace(cached_tokens=100)
    candidates = among([Pair(1, 11), Pair(2, 11)], {1: prefill, 11: decode})
    usual = RecentMeans(busy=0.5, prompt_s=0.1, link_s=0.05)  # 5 prompts/s for a worker; its link is in use a quarter
    (cost,) = costs_of(candidates, replace(REQUEST, usual=usual), [Pair(1, 11)]).values()
    late_s = 5 / (1 - 0.5) * 0.07 * (0 + 0.07 / 2)  # the shortest queue is empty
    moved_s = 0.902 + 5 / (1 - 0.25) * 0.9 * (0.001 + 0.9 / 2)
    wanted = Cost(0.07, grant_s=0, compute_s=0.07, late_s=late_s, transfer_s=moved_s, decode_s=0.15, stall_s=0.02)
    assert cost == pytest.approx(wanted._replace(later=math.sqrt(0.1 / 0.15)))
    assert cost.ttft_s == pytest.approx(0.14)
    assert cost.total_s == pytest.approx(0.14 + late_s + cost.later * (moved_s + 0.15 + 0.02))
    assert pair_cost(candidates, REQUEST).pair == Pair(2, 11)


@pytest.mark.parametrize("objectives", [NO_SLO, Slo(0.3, 0.025)], ids=["untold", "told"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_chosen_costs_least_of_what_is_explained(seed: int, objectives: Slo) -> None:
    rng = random.Random(seed)
    pairs = [Pair(p, d) for p in (1, 2, 3) for d in (2, 3, 11)]
    candidates = among(pairs, {key: _random_worker(rng) for key in (1, 2, 3, 11)})
    usual = RecentMeans(rng.random(), rng.random(), rng.random() / 10, rng.random())
    request = replace(REQUEST, usual=usual, slo=objectives)
    costs = costs_of(candidates, request, pairs)
    common_s = request.output_len * 0.01
    least_s = min(cost.total_s for cost in costs.values())
    assert costs[pair_cost(candidates, request).pair].total_s - least_s <= 0.05 * (least_s + common_s)
    assert {pair: ttft_s(candidates, request, pair) for pair in pairs} == {
        pair: cost.ttft_s for pair, cost in costs.items()
    }


def _random_worker(rng: random.Random) -> Worker:
    num_queued, num_running = rng.randrange(4), rng.randrange(9)
    load = busy(
        num_requests=num_queued + num_running,
        num_queued=num_queued,
        queued_tokens=1000 * num_queued,
        context_tokens=1000 * num_running,
        queued_transfer_bytes=rng.randrange(10**6),
        has_credit=rng.random() < 0.8,
    )
    return load._replace(cached_tokens=rng.randrange(1000), token_bytes=10**5)


def test_pages_are_waited_for_while_the_prompt_queues() -> None:
    assert Cost(queue_s=2, grant_s=3, compute_s=1).ttft_s == 4
    assert Cost(queue_s=3, grant_s=2, compute_s=1).ttft_s == 4


@pytest.mark.parametrize(
    ("workers", "wanted"),
    [
        ({}, set(SPLIT)),
        ({"p1": busy(queued_tokens=1000)}, {Pair(2, 11), Pair(2, 12)}),
        ({"p1": IDLE._replace(cached_tokens=800)}, {Pair(1, 11), Pair(1, 12)}),
        # a queue that takes less time than the cache saves, and one that takes more
        ({"p1": busy(queued_tokens=700)._replace(cached_tokens=800)}, {Pair(1, 11), Pair(1, 12)}),
        ({"p1": busy(queued_tokens=900)._replace(cached_tokens=800)}, {Pair(2, 11), Pair(2, 12)}),
        ({"p2": IDLE._replace(learned=replace(SPEED, prefill=Curve(0.01, 2e-4)))}, {Pair(1, 11), Pair(1, 12)}),
        ({"d11": decoding(5)}, {Pair(1, 12), Pair(2, 12)}),
        ({"d11": busy(has_credit=False), "d12": decoding(20)}, {Pair(1, 12), Pair(2, 12)}),
        ({"d11": busy(free_tokens=999)}, {Pair(1, 12), Pair(2, 12)}),
        ({"d11": busy(has_credit=False), "d12": busy(has_credit=False)}, set(SPLIT)),
        ({"d12": IDLE._replace(cached_tokens=900, token_bytes=10**6)}, set(SPLIT) - {Pair(1, 11), Pair(2, 11)}),
    ],
)
def test_the_pair_that_finishes_first_is_chosen(workers: Mapping[str, Worker], wanted: set[Pair]) -> None:
    heavy = {name: worker for name, worker in workers.items() if worker.token_bytes != 1000}
    others = {f"d{key}": IDLE._replace(token_bytes=10**6) for key in (11, 12)} if heavy else {}
    assert chosen(SPLIT, REQUEST.usual, **{**others, **workers}) == wanted


def test_a_slow_link_is_avoided() -> None:
    slow = busy(link_speeds={11: 1e6, 12: 1e9})
    assert chosen(SPLIT, p1=slow, p2=slow) == {Pair(1, 12), Pair(2, 12)}
    learned = slow._replace(
        learned=replace(SPEED, links={11: Line(0.0, 1e-3), 12: Line(0.0, 1e3)})
    )  # what was seen beats a test
    assert chosen(SPLIT, p1=learned, p2=learned) == {Pair(1, 11), Pair(2, 11)}


def test_equal_pairs_get_equal_shares() -> None:
    counts = Counter(pair_cost(among(SPLIT, {}), replace(REQUEST, number=n)).pair for n in range(40))
    assert counts == dict.fromkeys(SPLIT, 10)


def test_unified_workers_serve_each_other_when_that_is_worth_a_place_in_two_caches() -> None:
    assert chosen(UNIFIED) == {Pair(1, 1), Pair(2, 2)}
    queue, full = busy(num_requests=1, num_queued=1, queued_tokens=4000), busy(has_credit=False)
    assert chosen(UNIFIED, RecentMeans(found=0.0), w1=queue, w2=full) == {Pair(2, 1)}
    assert chosen(UNIFIED, RecentMeans(found=3.0), w1=queue, w2=full) == {
        Pair(1, 1),
        Pair(2, 1),
    }  # evicts as much as it saves
    has_all = IDLE._replace(cached_tokens=1000, learned=replace(SPEED, transfer=Line(0.0, 1.0)))
    assert chosen(UNIFIED, w1=has_all, w2=has_all) == {Pair(1, 2), Pair(2, 1)}


def test_a_prompt_is_computed_where_its_output_is_made_if_that_is_cheaper() -> None:
    """Conditional disaggregation: prefill worker 1, unified worker 2."""
    pairs = [Pair(1, 2), Pair(2, 2)]
    link = busy(link_speeds={2: 1e8})
    assert chosen(pairs, p1=link) == {Pair(2, 2)}  # moving 1 MB would take 10 ms
    assert chosen(pairs, p1=link, w2=decoding(5)) == {Pair(1, 2)}  # five others would stall for 0.11 s
    cached = decoding(5)._replace(cached_tokens=990)
    assert chosen(pairs, p1=link, w2=cached) == {Pair(2, 2)}  # they stall for ten tokens only
    assert chosen(pairs, p1=busy(link_speeds={2: 1e8}, queued_tokens=20_000), w2=decoding(5)) == {Pair(2, 2)}


def test_a_favourite_keeps_its_prompts_longer_where_all_queue_but_not_because_it_queues_itself() -> None:
    long_queue = busy(num_queued=9, queued_tokens=9000)
    favourite = long_queue._replace(cached_tokens=900)
    pairs = [Pair(p, 11) for p in (1, 2, 3)]
    assert chosen(pairs, CROWDED, p1=favourite) == {Pair(2, 11), Pair(3, 11)}
    queue = busy(num_queued=3, queued_tokens=3000)
    assert chosen(pairs, CROWDED, p1=favourite, p2=queue, p3=queue) == {Pair(1, 11)}
    assert chosen(pairs, p1=favourite, p2=queue, p3=queue) == {Pair(2, 11), Pair(3, 11)}  # nobody else comes


def test_no_worker_stays_idle_because_all_others_have_the_beginning_of_every_prompt() -> None:
    hot = busy(num_queued=7, queued_tokens=7000)._replace(cached_tokens=900)
    hot_ones = {f"p{key}": hot for key in range(1, 6)}
    pairs = [Pair(key, 11) for key in range(1, 8)]
    assert chosen(pairs, RecentMeans(busy=0.9, prompt_s=0.1), **hot_ones) == {Pair(6, 11), Pair(7, 11)}


def test_work_that_delays_many_is_dearer_than_work_that_delays_few() -> None:
    """A prompt that is cached where 0.45 s of work wait; computing it again takes 0.11 s, behind 0.3 s of work."""
    favourite = busy(num_queued=1, queued_tokens=4400)._replace(cached_tokens=900)
    pairs, queue = [Pair(1, 11), Pair(2, 11)], busy(num_queued=1, queued_tokens=2900)
    assert chosen(pairs, RecentMeans(busy=0.1, prompt_s=0.1), p1=favourite, p2=queue) == {Pair(2, 11)}
    assert chosen(pairs, RecentMeans(busy=0.8, prompt_s=0.1), p1=favourite, p2=queue) == {Pair(1, 11)}


def test_a_prompt_is_computed_where_it_stops_fewer_outputs() -> None:
    alone = [Pair(1, 1), Pair(2, 2)]
    assert chosen(alone, w1=decoding(9), w2=decoding(2)) == {Pair(2, 2)}


def test_outputs_with_much_slack_are_stopped_rather_than_a_prompt_kept_waiting() -> None:
    """0.08 s in a queue where no output is, or two outputs that stop for 0.11 s each."""
    alone, queue, outputs = [Pair(1, 1), Pair(2, 2)], busy(num_queued=1, queued_tokens=700), decoding(2)
    assert chosen(alone, w1=queue, w2=outputs) == {Pair(1, 1)}
    assert chosen(alone, RecentMeans(prompt_s=0.001), w1=queue, w2=outputs) == {Pair(2, 2)}


@pytest.mark.parametrize(
    ("objectives", "wanted"),
    [(NO_SLO, Pair(1, 1)), (Slo(0.02, 0.1), Pair(2, 2)), (Slo(5.0, 0.02), Pair(1, 1))],
    ids=["nobody said", "first tokens are urgent", "outputs are urgent"],
)
def test_who_knows_the_objectives_waits_or_stops_outputs_as_these_allow(objectives: Slo, wanted: Pair) -> None:
    """The same queue and the same outputs: an output of 10 tokens takes 0.11 s here, a prompt as a rule 0.1 s."""
    request = replace(REQUEST, usual=RecentMeans(prompt_s=0.1), slo=objectives)
    queue, outputs = busy(num_queued=1, queued_tokens=700), decoding(2)
    assert chosen_for(request, [Pair(1, 1), Pair(2, 2)], w1=queue, w2=outputs) == {wanted}


@pytest.mark.parametrize("objectives", [Slo(1.0, 0.0), Slo(0.0, 0.1), NO_SLO])
def test_one_objective_alone_weighs_nothing(objectives: Slo) -> None:
    request = replace(REQUEST, usual=CROWDED, slo=objectives)
    assert later_of(request, 0.4) == pytest.approx(0.5)


def test_a_second_after_the_first_token_is_worth_what_objectives_spare() -> None:
    """0.1 s a token allow an output of ten 1 s; it takes 0.4 s, so 0.6 s are spare, and for the first token 0.15 s."""
    request = replace(REQUEST, usual=CROWDED, slo=Slo(0.15, 0.1))
    assert later_of(request, 0.4) == pytest.approx(math.sqrt(0.15 / 0.6 * 0.1 / 0.4))
    assert later_of(replace(request, slo=Slo(30.0, 0.1)), 0.4) == 1.0  # as seconds, at most
    assert later_of(request, -1.0) == 1.0  # as of a worker that reports more free pages than it has
    assert later_of(request, 2.0) == pytest.approx(math.sqrt(0.15 / 0.05 * 0.1 / 2.0))  # it has nothing to spare


@pytest.mark.parametrize(
    ("busy_share", "objectives", "is_local"),
    [(0.9, NO_SLO, True), (0.1, Slo(1.0, 0.1), True), (0.9, Slo(1.0, 0.1), False)],
    ids=["nobody said", "few prompts", "many prompts"],
)
def test_outputs_keep_away_from_prompts_that_are_still_to_come(
    busy_share: float, objectives: Slo, is_local: bool
) -> None:
    """A hand-off delays an output by 0.03 s."""
    usual, far = RecentMeans(busy_share, prompt_s=0.1, found=0.0), IDLE._replace(token_bytes=30_000)
    pairs = chosen_for(replace(REQUEST, usual=usual, slo=objectives), UNIFIED, w1=far, w2=far)
    assert {pair.is_local for pair in pairs} == {is_local}


def test_an_output_is_not_made_where_prompts_wait_that_would_stop_it() -> None:
    pairs = [Pair(1, 2), Pair(1, 3), Pair(2, 2), Pair(3, 3)]
    waiting = busy(num_requests=2, num_queued=2, queued_tokens=8000)
    fewer = waiting._replace(load=waiting.load._replace(queued_tokens=6000))
    assert chosen(pairs, RecentMeans(found=0.0), w2=waiting, w3=fewer) == {Pair(1, 3)}


def test_equal_decode_workers_get_as_many_outputs_each() -> None:
    ids = (11, 12, 13, 14)
    pairs, outputs = [Pair(p, d) for p in (1, 2) for d in ids], dict.fromkeys(ids, 0)
    for number in range(40):
        candidates = among(pairs, {key: decoding(count) for key, count in outputs.items()})
        outputs[pair_cost(candidates, replace(REQUEST, number=number, usual=CROWDED)).pair.decode_id] += 1
    assert outputs == dict.fromkeys(ids, 10)


def test_where_links_are_crowded_a_busier_decode_worker_is_worth_the_kv_that_it_has() -> None:
    heavy = IDLE._replace(token_bytes=10**5)  # a prompt takes 0.1 s of a link
    has_kv = decoding(12)._replace(cached_tokens=1000, token_bytes=10**5)
    workers = {"d11": has_kv, "d12": heavy}
    assert chosen(SPLIT, CROWDED, **workers) == {Pair(1, 12), Pair(2, 12)}
    assert chosen(SPLIT, CROWDED._replace(link_s=0.11), **workers) == {Pair(1, 11), Pair(2, 11)}


def test_in_a_large_fleet_the_best_workers_are_paired_and_equals_take_turns() -> None:
    pairs = [Pair(p, 100 + d) for p in range(20) for d in range(20)]
    best = {7: IDLE._replace(cached_tokens=900), **{key: decoding(3) for key in range(100, 119)}}
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
    heavy = IDLE._replace(token_bytes=10**6)
    workers = {key: heavy for key in (1, *range(100, 100 + num_decode))}
    workers[103] = decoding(1)._replace(token_bytes=10**6, cached_tokens=900)
    candidates = among([Pair(1, key) for key in workers if key != 1], workers)
    assert {pair_cost(candidates, replace(REQUEST, number=n)).pair for n in range(16)} == {Pair(1, 103)}


def test_a_request_delays_those_who_can_spare_it_rather_than_those_who_cannot() -> None:
    """Two workers with an output each, of which one may take 20 ms a token and takes 10, the other may take 500."""
    tight, loose = Slo(1.0, 0.02), Slo(30.0, 0.5, 0.5)
    alone = [Pair(1, 1), Pair(2, 2)]
    for slo in (tight, loose, NO_SLO):
        request = replace(REQUEST, usual=CROWDED, slo=slo)
        beside = [decoding(1)._replace(load=decoding(1).load._replace(outputs=((each, 1),))) for each in (tight, loose)]
        assert chosen_for(request, alone, w1=beside[0], w2=beside[1]) == {Pair(2, 2)}
        assert chosen_for(request, alone, w1=beside[1], w2=beside[0]) == {Pair(1, 1)}


@pytest.mark.parametrize("slo", [NO_SLO, Slo(0.3, 0.025, 2.0, sheddable=True)])
@pytest.mark.parametrize("seed", range(5))
def test_where_all_slos_are_equal_a_pair_costs_what_it_costs_without_knowing_those_of_others(
    seed: int, slo: Slo
) -> None:
    rng = random.Random(seed)
    pairs = [Pair(p, d) for p in (1, 2) for d in (2, 11)]
    workers = {key: _random_worker(rng) for key in (1, 2, 11)}
    told = {
        key: each._replace(load=each.load._replace(outputs=((slo, each.load.num_requests - each.load.num_queued),)))
        for key, each in workers.items()
    }
    usual = RecentMeans(rng.random(), rng.random(), rng.random() / 10, rng.random())
    request = replace(REQUEST, usual=usual, slo=slo)
    also = replace(request, usual=usual._replace(urgency=urgency(slo)))
    assert costs_of(among(pairs, told), also, pairs) == costs_of(among(pairs, workers), request, pairs)


def test_a_prompt_whose_beginning_another_worker_has_costs_what_it_takes_to_pull_that() -> None:
    """900 tokens of 1,000 bytes come in 0.9 ms, and 10 ms; to compute them takes 90 ms."""
    held = IDLE._replace(held=HeldPrefix(11, 900, 1e9))
    assert computed_s(held, 1000) == pytest.approx(0.01 + 0.0009 + 0.01 + 100e-4)
    assert computed_s(IDLE, 1000) == pytest.approx(0.01 + 1000e-4)
    slow = IDLE._replace(held=HeldPrefix(11, 900, 1e6))
    assert computed_s(slow, 1000) == computed_s(IDLE, 1000), "to compute it is sooner"
    mostly_here = IDLE._replace(cached_tokens=896, held=HeldPrefix(11, 900, 1e9))
    assert computed_s(mostly_here, 1000) == computed_s(mostly_here._replace(held=None), 1000)


def test_who_may_pull_a_prompt_is_chosen_before_who_has_a_queue_and_the_prompt() -> None:
    has_it = busy(num_queued=3, queued_tokens=3000)._replace(cached_tokens=960)
    assert chosen(SPLIT, w1=has_it, w2=IDLE) == {Pair(2, 11), Pair(2, 12)}
    short_queue = busy(num_queued=1, queued_tokens=300)._replace(cached_tokens=960)
    assert chosen(SPLIT, w1=short_queue, w2=IDLE) == {Pair(1, 11), Pair(1, 12)}
    pulling = IDLE._replace(held=HeldPrefix(1, 960, 1e9))
    assert chosen(SPLIT, w1=short_queue, w2=pulling) == {Pair(2, 11), Pair(2, 12)}


def begun(worker: Worker) -> tuple[float, float]:
    """Return how long a worker waits for what there is of 1,000 tokens, and then computes."""
    cost = prefill_cost(worker, REQUEST, decodes=False)
    assert computed_s(worker, 1000) == cost.own_s
    return cost.restore_s, cost.compute_s


FILES = TierLoad("files", 0, 960, 0.02)  # 960 tokens are computed in 96 ms


def test_a_first_token_counts_what_a_load_takes_or_computing_whichever_is_less() -> None:
    in_files = IDLE._replace(cached_tokens=960, loads=(FILES,))
    assert begun(in_files) == pytest.approx((0.02, 0.01 + 40e-4))
    slow = in_files._replace(loads=(FILES._replace(load_s=0.1),))
    assert begun(slow) == begun(IDLE)
    in_both = IDLE._replace(cached_tokens=960, loads=(TierLoad("host", 480, 640, 1e-5), TierLoad("files", 640, 960, 9)))
    assert begun(in_both) == pytest.approx((1e-5, 0.01 + 360e-4)), "the first tier pays, the second does not"


def test_a_worker_with_a_prefix_in_files_is_between_one_that_computes_it_and_one_that_has_it_in_its_pool() -> None:
    in_files, in_pool = IDLE._replace(cached_tokens=960, loads=(FILES,)), IDLE._replace(cached_tokens=960)
    assert {pair.prefill_id for pair in chosen(SPLIT, w1=in_files, w2=IDLE)} == {1}
    assert {pair.prefill_id for pair in chosen(SPLIT, w1=in_files, w2=in_pool)} == {2}
    queue = in_pool._replace(load=busy(num_queued=1, queued_tokens=200).load)
    assert {pair.prefill_id for pair in chosen(SPLIT, w1=in_files, w2=queue)} == {1}, "30 ms of a queue cost more"
    slow = in_files._replace(loads=(FILES._replace(load_s=5.0),))
    assert {pair.prefill_id for pair in chosen(SPLIT, w1=slow, w2=IDLE)} == {1, 2}


def test_who_decodes_elsewhere_loads_before_it_grants_pages_and_alone_it_does_that_once() -> None:
    in_files = IDLE._replace(cached_tokens=960, loads=(FILES,))
    candidates = among(UNIFIED, {1: in_files, 2: in_files})
    costs = costs_of(candidates, REQUEST, UNIFIED)
    assert (costs[Pair(1, 1)].grant_s, costs[Pair(1, 2)].grant_s) == (0, 0.02)
    for pair, cost in costs.items():
        assert ttft_s(candidates, REQUEST, pair) == pytest.approx(cost.ttft_s)
    assert pair_cost(candidates, REQUEST).pair.is_local


def test_what_a_load_takes_holds_up_no_prompts_that_come_later() -> None:
    usual = replace(REQUEST, usual=CROWDED)
    loading = IDLE._replace(cached_tokens=960, loads=(FILES,))
    (cost,) = costs_of(among([Pair(1, 11)], {1: loading}), usual, [Pair(1, 11)]).values()
    (there,) = costs_of(among([Pair(1, 11)], {1: IDLE._replace(cached_tokens=960)}), usual, [Pair(1, 11)]).values()
    assert cost == there._replace(restore_s=0.02)
