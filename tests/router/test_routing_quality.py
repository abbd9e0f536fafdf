"""The replay that measures policies, and what it must show of them on a made-up trace."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from routing.block_cache import BlockCache
from routing.cell import Cell
from routing.contest import hold
from routing.engine import Engine, Job
from routing.family import member
from routing.fleet import Fleet, disaggregated, unified
from routing.hardware import DENSE_32B, MIXED_STEP_S, SERIAL
from routing.outcome import Outcome, outcome, pooled_hit_rate
from routing.trace import parse_rows, read_trace, synthetic_rows, whole_blocks

from diptych.engine.options.config import EngineOptions
from diptych.generation.slo import NO_SLO
from diptych.router.choose.policies import POLICIES
from diptych.router.choose.policies.pair_cost import pair_cost
from diptych.router.workers.worker_view import Pair

NUM_BLOCKS = 512
REQUESTS = parse_rows(synthetic_rows(1000))
ALONE = replace(unified(8, SERIAL, NUM_BLOCKS), may_pair=lambda pair: pair.is_local)
SPLIT = disaggregated(4, 2, DENSE_32B, NUM_BLOCKS)


def closed(policy: str) -> Outcome:
    return outcome(ALONE.replay(POLICIES[policy]).closed_loop(whole_blocks(REQUESTS), 64), ALONE.prefill_ids)


def opened(policy: str, fleet: Fleet, speed: float) -> Outcome:
    return outcome(fleet.replay(POLICIES[policy]).open_loop(REQUESTS[:500], speed), fleet.prefill_ids)


# the policies


@pytest.mark.parametrize("policy", ["cache_aware", "pair_cost"])
def test_a_prompt_goes_where_it_is_cached_and_no_worker_has_more_to_do(policy: str) -> None:
    found = closed(policy)
    assert found.hit_rate > 0.8 * pooled_hit_rate(REQUESTS, 8 * NUM_BLOCKS)
    assert found.cv_missed < 0.1


def test_pair_cost_meets_more_objectives_than_policies_that_look_at_loads_or_caches_alone() -> None:
    best = opened("pair_cost", SPLIT, 1.5)
    for other in ("least_load", "cache_aware"):
        found = opened(other, SPLIT, 1.5)
        assert best.goodput(1.0, 0.05) > found.goodput(1.0, 0.05)


@pytest.mark.parametrize("speed", [0.3, 1.0])
def test_a_choice_between_one_worker_and_two_is_hardly_worse_than_the_better_of_both(speed: float) -> None:
    fleet = unified(6, DENSE_32B, NUM_BLOCKS)
    either = opened("pair_cost", fleet, speed)
    one = opened("pair_cost", replace(fleet, may_pair=lambda pair: pair.is_local), speed)
    two = opened("pair_cost", replace(fleet, may_pair=lambda pair: not pair.is_local), speed)
    assert either.total_s.mean() < 1.05 * min(one.total_s.mean(), two.total_s.mean())


@pytest.mark.parametrize(
    ("seed", "rival"),
    [(43, "least_load"), (34, "cache_aware"), (44, "least_load")],
    ids=["one beginning for all, ten workers", "links that are nearly full", "three unified workers, short prompts"],
)
def test_no_policy_is_much_better_where_a_weight_for_misses_did_harm(seed: int, rival: str) -> None:
    load = member(seed, 700)
    own, other = (
        outcome(load.fleet.replay(POLICIES[policy]).open_loop(load.requests, 1.0), load.fleet.prefill_ids)
        for policy in ("pair_cost", rival)
    )
    for wanted in load.objectives:
        assert own.goodput(wanted.ttft_s, wanted.tpot_s) > 0.9 * other.goodput(wanted.ttft_s, wanted.tpot_s)


@pytest.mark.parametrize("cell", [0, 2, 5])
def test_unified_workers_meet_more_objectives_when_these_are_known(cell: int) -> None:
    load = member(1)
    wanted = load.objectives[cell]
    told, untold = (
        outcome(load.fleet.replay(pair_cost, known).open_loop(load.requests, 1.0), load.fleet.prefill_ids)
        for known in (wanted, NO_SLO)
    )
    assert told.goodput(wanted.ttft_s, wanted.tpot_s) > 1.15 * untold.goodput(wanted.ttft_s, wanted.tpot_s)


# the family


def test_a_member_is_drawn_from_its_seed_alone() -> None:
    one, same, other = (member(seed, 50) for seed in (3, 3, 4))
    assert (one.shape, one.busy, one.fleet.hardware) == (same.shape, same.busy, same.fleet.hardware)
    assert [request.arrival_s for request in one.requests] == [request.arrival_s for request in same.requests]
    assert [request.block_list for request in one.requests] == [request.block_list for request in same.requests]
    assert one.shape != other.shape


def test_members_differ_in_what_they_share_and_where_they_are_served() -> None:
    members = [member(seed, 200) for seed in range(24)]
    hits = [pooled_hit_rate(one.requests, 10**6) for one in members]
    assert min(hits) < 0.3
    assert max(hits) > 0.8
    assert len({one.fleet.is_unified for one in members}) == 2
    assert max(one.fleet.hardware.token_s for one in members) > 5 * min(one.fleet.hardware.token_s for one in members)


def test_a_contest_gives_each_cell_the_best_of_all_others() -> None:
    contest = hold(member(3, 60))
    assert contest.member.fleet.is_unified
    assert {"least_load", "pair_cost, always one", "pair_cost, always two"} <= set(contest.others)
    assert "pair_cost" not in contest.others
    assert list(contest.told) == list(contest.member.objectives)
    for wanted, told, untold in zip(contest.told, contest.cells, contest.untold_cells, strict=True):
        assert told.own == (contest.told[wanted][0].goodput(wanted.ttft_s, wanted.tpot_s),)
        assert untold.own == (contest.untold[0].goodput(wanted.ttft_s, wanted.tpot_s),)
        most = max(found.goodput(wanted.ttft_s, wanted.tpot_s) for (found,) in contest.others.values())
        assert told.best == untold.best == (most,)


def test_a_drawing_changes_names_turns_and_draws_and_nothing_else() -> None:
    fleet = unified(4, DENSE_32B, NUM_BLOCKS)
    one, same, other = (fleet.drawn(number) for number in (1, 1, 2))
    assert one == same != other
    assert fleet.drawn(0) is fleet
    assert one.is_unified
    assert len({*fleet.prefill_ids, *one.prefill_ids, *other.prefill_ids}) == 12
    apart = SPLIT.drawn(1)
    assert (len(apart.prefill_ids), len(apart.decode_ids)) == (4, 2)
    assert not {*apart.prefill_ids} & {*apart.decode_ids}
    found = [opened("least_load", each, 1.5) for each in (SPLIT, apart)]
    assert found[0].arrival_s.tolist() == found[1].arrival_s.tolist()
    assert found[0].total_s.tolist() != found[1].total_s.tolist()


def test_a_contest_holds_every_run_once_a_drawing() -> None:
    contest = hold(member(3, 60), 3)
    assert {len(found) for found in (contest.untold, *contest.told.values(), *contest.others.values())} == {3}
    assert contest.untold[0].total_s.tolist() == hold(member(3, 60)).untold[0].total_s.tolist()


def test_one_policy_has_to_do_for_all_cells_of_a_member() -> None:
    contest = hold(member(3, 300))
    missed = {name: sum(cell.misses(name) for cell in contest.untold_cells) for name in contest.others}
    assert contest.fewest_missed == min(missed.values()) < max(missed.values())
    cell = Cell((0.5,), {"best": (0.8,), "near": (0.795,), "far": (0.79,)})
    assert [cell.misses(name) for name in cell.others] == [False, False, True]
    assert not Cell((0.0,), {"best": (0.01,), "other": (0.0,)}).misses("other")


def test_cells_compare_means_with_the_other_that_has_most_in_the_mean() -> None:
    lucky, steady = (0.9, 0.1, 0.2), (0.8, 0.8, 0.8)
    cell = Cell((0.4, 0.5, 0.6), {"lucky": lucky, "steady": steady})
    assert cell.best == steady
    assert cell.ratio == pytest.approx(0.625)
    assert cell.spread == 0.0
    assert Cell((0.0,), {"other": (0.01,)}).ratio == 1.0


@pytest.mark.parametrize(
    ("own", "is_lost"),
    [((0.70, 0.71, 0.72), True), ((0.5, 0.8, 0.95), False), ((0.795, 0.795, 0.795), False), ((0.9, 0.9, 0.9), False)],
    ids=["always less", "less by chance", "less by less than 1 %", "more"],
)
def test_a_cell_is_lost_where_chance_does_not_explain_it(own: tuple[float, ...], is_lost: bool) -> None:
    assert Cell(own, {"other": (0.8, 0.8, 0.8)}).is_lost is is_lost


def test_the_error_of_a_ratio_is_that_of_the_mean_of_so_many_drawings() -> None:
    cell = Cell((0.7, 0.8, 0.9), {"other": (0.8, 0.8, 0.8)})
    assert cell.error == pytest.approx(2.920 * 0.1 / math.sqrt(3) / 0.8)
    assert Cell((0.7,), {"other": (0.8,)}).error == 0.0


def test_the_floor_is_what_the_best_policy_is_below_itself_and_the_luckiest_of_others() -> None:
    assert Cell((0.0, 0.0), {"best": (0.80, 0.75)}).self_failures == 0.5  # 0.75 of 0.80
    cell = Cell((0.0, 0.0), {"best": (0.80, 0.795), "lucky": (0.1, 0.9)})
    assert cell.self_failures == 0.0
    assert cell.floor_failures == 0.5  # 0.80 of 0.9, and 0.795 of 0.80
    alone = Cell((0.0,), {"best": (0.8,)})
    assert (alone.self_failures, alone.floor_failures) == (0.0, 0.0)


# simulated workers


def test_a_step_beside_running_requests_takes_no_longer_than_workers_let_it() -> None:
    assert EngineOptions().mixed_step_s == MIXED_STEP_S == DENSE_32B.mixed_step_s
    slow = replace(DENSE_32B, token_s=4 * DENSE_32B.token_s)
    few = slow.num_tokens(20_000, 0.05)
    assert slow.compute_s(20_000, 20_000 + few) <= 0.05 < slow.compute_s(20_000, 20_001 + few)
    assert slow.num_tokens(0, -1.0) == 0
    engine = Engine(1, slow, BlockCache(NUM_BLOCKS))
    prompts = [Job(request, Pair(1, 1), number, 0.0) for number, request in enumerate(REQUESTS[:2])]
    engine.add_prompt(prompts[0], 0.0)
    assert engine.next_s == slow.prompt_s + slow.compute_s(0, min(slow.chunk_tokens, prompts[0].request.prompt_len))
    engine = Engine(1, slow, BlockCache(NUM_BLOCKS))
    engine.join(prompts[0], 0.0)
    engine.add_prompt(prompts[1], 0.0)
    begun_s = engine.next_s
    engine.step()
    engine.go_on(begun_s)
    assert MIXED_STEP_S - 2 * slow.token_s < engine.next_s - begun_s - slow.prompt_s <= MIXED_STEP_S


def test_a_prompt_finds_what_the_one_before_it_computed() -> None:
    first, second = (replace(REQUESTS[0], output_len=1, arrival_s=0.0) for _ in range(2))
    fleet = unified(1, DENSE_32B, NUM_BLOCKS)
    jobs = fleet.replay(POLICIES["round_robin"]).open_loop([first, second], 1.0)
    assert [job.cached_blocks for job in jobs] == [0, first.num_blocks]


def test_the_step_after_its_prompt_continues_a_request() -> None:
    one, other = (replace(request, output_len=2, arrival_s=0.0) for request in REQUESTS[:2])
    fleet = unified(1, replace(DENSE_32B, mixed_step_s=10.0), NUM_BLOCKS)
    jobs = fleet.replay(POLICIES["round_robin"]).open_loop([one, other], 1.0)
    assert jobs[0].first_token_s < jobs[0].finished_s <= jobs[1].first_token_s


# the replay itself


def test_a_replay_is_the_same_every_time() -> None:
    runs = [opened("power_of_two", SPLIT, 1.0) for _ in range(2)]
    assert runs[0].total_s.tolist() == runs[1].total_s.tolist()


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in synthetic_rows(30)), encoding="utf-8")
    read, made = read_trace(path, 20), parse_rows(synthetic_rows(20))
    assert [request.block_list for request in read] == [request.block_list for request in made]


def test_requests_of_one_instant_are_spread_up_to_the_next() -> None:
    rows = [{"timestamp": ms, "input_length": 5, "output_length": 1, "hash_ids": [0]} for ms in (0, 0, 3000, 3000)]
    assert [request.arrival_s for request in parse_rows(rows)] == [0.0, 1.5, 3.0, 3.0]


def test_an_old_block_goes_before_those_that_it_continues() -> None:
    cache = BlockCache(3)
    assert cache.put([1, 2, 3]) == ([1, 2, 3], [])
    assert cache.put([1, 4]) == ([4], [3])
    assert [cache.cached(blocks) for blocks in ([1, 2, 3], [1, 4], [2])] == [2, 2, 1]


def test_steps_that_pass_at_once_take_as_long_as_one_by_one() -> None:
    jobs = [_decoding(number, prompt_len, output_len) for number, (prompt_len, output_len) in enumerate(CONTEXTS)]
    engine = Engine(1, DENSE_32B, BlockCache(8))
    for job in jobs:
        job.has_memory = True
        engine.join(job, 0.0)
    ends: dict[int, float] = {}
    while engine.next_s < math.inf:
        now_s = engine.next_s
        ends |= {job.number: now_s for job in engine.step()[1]}
        engine.go_on(now_s)
    assert ends == pytest.approx(_step_by_step(CONTEXTS))


CONTEXTS = ((1000, 5), (20_000, 40), (300, 40), (50_000, 12))


def _decoding(number: int, prompt_len: int, output_len: int) -> Job:
    return Job(replace(REQUESTS[0], prompt_len=prompt_len, output_len=output_len), Pair(1, 1), number, 0.0)


def _step_by_step(contexts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """The first one begins alone: the others join at its next step."""
    now_s, done = 0.0, dict.fromkeys(range(len(contexts)), 1)
    ends: dict[int, float] = {}
    running = [0]
    while running:
        tokens = sum(contexts[number][0] + done[number] for number in running)
        now_s += DENSE_32B.step_s + DENSE_32B.context_token_s * tokens
        for number in running:
            done[number] += 1
        ends |= {number: now_s for number in running if done[number] == contexts[number][1]}
        running = [number for number in done if number not in ends]
    return ends
