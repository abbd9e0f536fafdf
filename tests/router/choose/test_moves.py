"""Which output moves, and where: tables of workers and outputs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from diptych.generation.slo import Slo
from diptych.router.choose.moves import (
    GAIN,
    LEAVING,
    LOOK_S,
    MARGIN,
    MAX_LATE,
    MIN_LEFT,
    TURN_S,
    WINDOWS,
    Choice,
    Departure,
    Moves,
    PromptTime,
    RunningOutput,
    best_move,
    departures,
    is_turn,
    tightest_s,
)
from diptych.router.choose.policies.beside import share_of, step_s
from diptych.router.choose.policies.policy import Candidates, Worker
from diptych.router.workers.worker_view import Pair, WorkerLoad

OLD, NEW, OTHER = 1, 2, 3
SLO = Slo(ttft_s=1.0, tpot_s=0.03)
STEP_S, TOKEN_S = 0.01, 1e-6  # of a worker: 20,000 tokens of context fit into 30 ms
LONG = RunningOutput(OLD, SLO, num_tokens=8000, num_output_tokens=200, num_left_at_most=1000)
USUAL = 400.0


def worker(key: int, context: int, *outputs: tuple[Slo, int], **load: Any) -> Worker:
    told = WorkerLoad(
        num_requests=sum(count for _, count in outputs),
        queued_tokens=0,
        free_tokens=load.pop("free_tokens", 1_000_000),
        output_tokens=context,
        num_outputs=sum(count for _, count in outputs),
        output_step_s=STEP_S,
        context_token_s=TOKEN_S,
        outputs=outputs,
        link_speeds=load.pop("link_speeds", {NEW: 1e10, OTHER: 1e10}),
        **load,
    )
    return Worker(key, told, token_bytes=100_000)


LATE = worker(OLD, 32_000, (SLO, 4))
FREE = worker(NEW, 0)
IDLE = PromptTime({}, 0.0)  # nobody computes prompts


def choice(
    *targets: Worker,
    late: Worker = LATE,
    allowed: Any = None,
    time: PromptTime = IDLE,
    **outputs: RunningOutput,
) -> Choice | None:
    found = dict(enumerate(outputs.values())) or {0: LONG}
    may = {"": {each.instance_id for each in targets}} if allowed is None else allowed
    return best_move(late, found, {each.instance_id: each for each in targets}, may, USUAL, time)


def test_a_worker_is_late_when_a_step_takes_longer_than_its_tightest_output_allows() -> None:
    tight = SLO._replace(tpot_s=0.02)
    assert tightest_s(worker(OLD, 0, (SLO, 1), (tight, 1), (Slo(), 5))) == 0.02
    assert tightest_s(worker(OLD, 0, (Slo(), 5))) == float("inf")


def test_only_who_is_late_for_some_looks_in_a_row_gives_an_output_away() -> None:
    moves = Moves()
    for number in range(1, WINDOWS + 3):
        assert moves.late([LATE, FREE]) == ([OLD] if number >= WINDOWS else [])
    assert moves.late([FREE]) == []
    assert moves.late([LATE]) == [], "it counts anew"


def test_late_workers_give_away_one_at_a_time() -> None:
    workers = {OLD: LATE, NEW: FREE, OTHER: LATE._replace(instance_id=OTHER)}
    candidates = Candidates(workers, {key: tuple(workers) for key in workers})
    outputs = {5: LONG, 7: replace(LONG, worker_id=OTHER), 8: replace(LONG, worker_id=OTHER)}
    moves = Moves()
    for _ in range(WINDOWS - 1):
        assert moves.due(candidates, lambda ids: outputs, lambda key, adapter: workers, USUAL) == []
    found = moves.due(candidates, lambda ids: outputs, lambda key, adapter: workers, USUAL)
    assert [(each.place, each.target_id) for each in found] == [(5, NEW)], "who takes one is not asked twice at once"
    assert moves.due(None, lambda ids: outputs, lambda key, adapter: workers, USUAL) == []


def fleet(*workers: Worker) -> Candidates:
    by_id = {each.instance_id: each for each in workers}
    return Candidates(by_id, {key: tuple(by_id) for key in by_id})


def test_who_has_given_one_away_is_looked_at_anew_before_the_next() -> None:
    moves, outputs = Moves(), dict.fromkeys(range(8), LONG)
    found = [
        len(moves.due(fleet(LATE, FREE), lambda ids: outputs, lambda key, adapter: {NEW}, USUAL))
        for _ in range(3 * WINDOWS)
    ]
    assert found == [*[0] * (WINDOWS - 1), 1] * 3


@pytest.mark.parametrize("num_routers", [1, 2, 4, 7])
def test_several_routers_give_away_no_more_than_one(num_routers: int) -> None:
    """Each has outputs of the late worker, and looks at another moment; the worker's load tells nothing yet."""
    routers = [Moves() for _ in range(num_routers)]
    outputs = dict.fromkeys(range(8), LONG)
    looks = 40 * num_routers
    moved_s: list[tuple[float, int]] = []
    for look in range(looks):
        for place, moves in enumerate(routers):
            now_s = 1e9 + (look + place / num_routers) * LOOK_S

            def may_leave(key: int, place: int = place, now_s: float = now_s) -> bool:
                return is_turn(key, place, num_routers, now_s)

            found = moves.due(fleet(LATE, FREE), lambda ids: outputs, lambda key, adapter: {NEW}, USUAL, may_leave)
            moved_s += [(now_s, place)] * len(found)
    gaps_s = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(moved_s)]
    assert min(gaps_s) > (WINDOWS - 1) * LOOK_S
    assert {place for _, place in moved_s} == set(range(num_routers)), "each has its turn"
    assert len(moved_s) >= looks * LOOK_S / TURN_S - 1, "and nobody's turn is lost"


def overload(num_workers: int, *others: Worker) -> Candidates:
    return fleet(*(LATE._replace(instance_id=100 + number) for number in range(num_workers)), *others)


def test_where_nobody_has_time_to_spare_no_output_is_looked_at() -> None:
    def outputs(ids: Any) -> dict[int, RunningOutput]:
        raise AssertionError("asked in vain")

    moves = Moves()
    for _ in range(2 * WINDOWS):
        assert moves.due(overload(64), outputs, lambda key, adapter: {NEW}, USUAL) == []


def test_one_look_asks_for_outputs_of_a_few_late_workers_and_all_have_their_turn() -> None:
    moves, asked = Moves(), list[list[int]]()

    def outputs(ids: Any) -> dict[int, RunningOutput]:
        asked.append(list(ids))
        return {}

    for _ in range(WINDOWS - 1 + 16):
        moves.due(overload(64, FREE), outputs, lambda key, adapter: {NEW}, USUAL)
    assert {len(ids) for ids in asked} == {MAX_LATE}
    assert sorted(key for ids in asked for key in ids) == list(range(100, 164))


def test_an_output_goes_to_the_worker_that_keeps_all_it_then_has() -> None:
    busy = worker(OTHER, 15_000, (SLO, 4))
    found = choice(busy, FREE)
    assert found is not None
    assert found.target_id == NEW
    assert choice(busy) is None, "its step would take 33 ms"
    assert choice(worker(NEW, 0, (SLO._replace(tpot_s=0.015), 1))) is None, "an output there has 15 ms only"


def test_the_new_worker_has_something_to_spare_afterwards() -> None:
    """So it is not late at once, and nothing goes to and fro."""
    fits = (MARGIN * SLO.tpot_s - STEP_S) / TOKEN_S - LONG.num_tokens - LONG.num_left(USUAL) / 2
    assert choice(worker(NEW, int(fits) - 1, (SLO, 1))) is not None
    assert choice(worker(NEW, int(fits) + 1, (SLO, 1))) is None


def test_it_never_returns_to_where_it_was() -> None:
    assert choice(FREE, one=replace(LONG, asked=frozenset({Pair(NEW, OLD)}))) is None
    assert choice(FREE, one=replace(LONG, asked=frozenset({Pair(OLD, NEW)}))) is None, "nor is anybody asked twice"


def test_an_adapter_must_be_there() -> None:
    tuned = replace(LONG, adapter="tuned")
    assert choice(FREE, one=tuned, allowed={"": {NEW}, "tuned": set()}) is None
    assert choice(FREE, one=tuned, allowed={"": set(), "tuned": {NEW}}) is not None


def test_there_must_be_memory_for_it_and_for_what_grows() -> None:
    assert choice(worker(NEW, 0, free_tokens=8100)) is None
    assert choice(worker(NEW, 0, has_credit=False)) is None


def test_the_output_that_relieves_most_for_longest_moves() -> None:
    short = replace(LONG, num_tokens=500)
    found = choice(FREE, short=short, long=LONG, ending=replace(LONG, num_left_at_most=3))
    assert found is not None
    assert found.place == 1


@pytest.mark.parametrize("num_left", [1000, 2])
def test_a_move_must_be_worth_what_it_costs(num_left: int) -> None:
    """Behind the last tokens it would stand still for longer than they are late."""
    assert (choice(FREE, one=replace(LONG, num_left_at_most=num_left)) is not None) == (num_left > 2)


def test_a_slow_link_makes_it_dear() -> None:
    slow = worker(OLD, 32_000, (SLO, 4), link_speeds={NEW: 1e8})  # 8 s for 800 MB
    assert choice(FREE, late=slow) is None


@pytest.mark.parametrize("busy", [0.0, 0.2, 0.4, 0.8])
def test_prompts_keep_twice_the_time_that_they_take(busy: float) -> None:
    """The new worker had all of its time for prompts, and would have 40 % of it."""
    shares = {OLD: share_of(LATE, SLO.tpot_s), NEW: 1.0}
    after = share_of(FREE, SLO.tpot_s, LONG.num_tokens + LONG.num_left(USUAL) / 2)
    assert 0.3 < after < 0.45
    found = choice(FREE, time=PromptTime(shares, busy))
    assert (found is not None) == (busy <= (after + 0.02) / 2)
    assert choice(FREE, time=PromptTime({OLD: shares[OLD]}, busy)) is not None, "it computes no prompts"


def test_an_output_may_go_where_prompts_had_no_time_before() -> None:
    giver = worker(OLD, 24_000, (SLO, 4))  # which has 20 % for prompts without it
    taker = worker(NEW, 8_000, (SLO, 1))
    shares = {OLD: share_of(giver, SLO.tpot_s), NEW: 0.1}
    assert choice(taker, late=giver, time=PromptTime(shares, 0.1)) is not None
    assert choice(taker, late=giver, time=PromptTime({**shares, NEW: 0.9}, 0.9)) is None


def test_what_prompts_take_is_seen_look_by_look() -> None:
    busy = worker(NEW, 0, num_queued=1)
    candidates = Candidates({OLD: LATE, NEW: busy}, {OLD: (OLD, NEW), NEW: (OLD, NEW)})
    idle = replace(candidates, workers={OLD: LATE, NEW: FREE})
    moves = Moves()
    for _ in range(40):
        assert moves.due(candidates, lambda ids: {0: LONG}, lambda key, adapter: {NEW}, USUAL) == []
    assert moves.due(idle, lambda ids: {0: LONG}, lambda key, adapter: {NEW}, USUAL) == [], "it was busy until now"
    found = [moves.due(idle, lambda ids: {0: LONG}, lambda key, adapter: {NEW}, USUAL) for _ in range(40)]
    assert {each.target_id for choices in found[20:] for each in choices} == {NEW}


def test_what_is_told_adds_up() -> None:
    found = choice(FREE)
    assert found is not None
    late_s, after_s = 0.042 - 0.030, 0.034 - 0.030
    left = LONG.num_left(USUAL)
    assert found.gain_s == pytest.approx((4 * late_s - 3 * after_s) * left)
    assert found.cost_s == pytest.approx(0.08 + 2 * (0.042 + STEP_S + (8000 + left / 2) * TOKEN_S))
    assert found.words.startswith("its worker was late, and ")


def test_random_fleets_come_to_rest_and_every_move_helps() -> None:
    """Moves are made as they are found: all together fewer tokens are late behind each, and there is an end."""
    for seed in range(60):
        rng = random.Random(seed)
        outputs = {
            place: RunningOutput(rng.randrange(4), SLO, rng.randrange(200, 9000), 300, 800) for place in range(24)
        }
        num_moves = 0
        while True:
            workers = {key: fleet_worker(key, outputs) for key in range(4)}
            late = [each for each in workers.values() if step_s(each) > tightest_s(each)]
            found = next((found for each in late if (found := _first(each, outputs, workers))), None)
            if found is None:
                break
            assert found.gain_s > GAIN * found.cost_s
            moved = outputs[found.place]
            before = total_late(workers)
            hop = Pair(moved.worker_id, found.target_id)
            outputs[found.place] = replace(moved, worker_id=found.target_id, asked=moved.asked | {hop})
            assert total_late({key: fleet_worker(key, outputs) for key in range(4)}) < before
            num_moves += 1
            assert num_moves <= len(outputs)


def fleet_worker(key: int, outputs: dict[int, RunningOutput]) -> Worker:
    own = [output for output in outputs.values() if output.worker_id == key]
    speeds = {"link_speeds": dict.fromkeys(range(4), 1e10)}
    return worker(key, sum(output.num_tokens for output in own), *([(SLO, len(own))] if own else []), **speeds)


def _first(late: Worker, outputs: dict[int, RunningOutput], workers: dict[int, Worker]) -> Choice | None:
    own = {place: output for place, output in outputs.items() if output.worker_id == late.instance_id}
    targets = {key: each for key, each in workers.items() if key != late.instance_id}
    return best_move(late, own, targets, {"": set(targets)}, USUAL, IDLE)


def total_late(workers: dict[int, Worker]) -> float:
    return sum(each.load.num_outputs * max(0.0, step_s(each) - SLO.tpot_s) for each in workers.values())


def leaving(*targets: Worker, allowed: Any = None, **outputs: RunningOutput) -> list[Departure]:
    workers = {each.instance_id: each for each in targets}
    may = set(workers) if allowed is None else allowed
    return departures(workers, dict(enumerate(outputs.values())), lambda key, adapter: may, USUAL)


def test_an_output_leaves_for_whoever_is_the_fastest_with_it() -> None:
    assert leaving(worker(NEW, 8000), worker(OTHER, 0), a=LONG) == [(0, OTHER)]
    assert leaving(worker(NEW, 8000), worker(OTHER, 0), a=LONG, allowed={NEW}) == [(0, NEW)]
    assert leaving(worker(NEW, 8000), worker(OTHER, 0), a=LONG, allowed=set()) == []
    assert leaving(worker(NEW, 0), a=replace(LONG, asked=frozenset({Pair(NEW, OLD)}))) == [(0, NEW)], (
        "it comes to no fro"
    )


def test_outputs_that_leave_together_do_not_all_go_to_one() -> None:
    found = leaving(worker(NEW, 4000), worker(OTHER, 0), a=LONG, b=LONG, c=LONG)
    assert [each.target_id for each in found] == [OTHER, NEW, OTHER]


def test_an_output_leaves_for_where_times_are_kept_and_elsewhere_only_if_they_are_nowhere() -> None:
    quick = worker(NEW, 0, (SLO._replace(tpot_s=0.011), 1))
    assert leaving(quick, worker(OTHER, 2000, (SLO, 1)), a=LONG) == [(0, OTHER)]
    assert leaving(quick, a=LONG) == [(0, NEW)]


def test_an_output_waits_for_memory_and_takes_none_that_another_one_gets() -> None:
    assert leaving(worker(NEW, 0, free_tokens=8100), a=LONG) == []
    assert leaving(worker(NEW, 0, free_tokens=9000), a=LONG, b=LONG) == [(0, NEW)]
    assert leaving(worker(NEW, 0, has_credit=False), a=LONG) == []


def test_those_with_most_to_come_leave_first_and_those_that_are_about_to_end_stay() -> None:
    short = [replace(LONG, num_left_at_most=each) for each in (MIN_LEFT - 1, MIN_LEFT, 90)]
    assert leaving(FREE, a=short[0], b=short[1], c=short[2], d=LONG) == [(3, NEW), (2, NEW), (1, NEW)]


@pytest.mark.parametrize(("num_outputs", "num_leaving"), [(3, 3), (40, LEAVING), (160, 20)])
def test_some_leave_at_each_look(num_outputs: int, num_leaving: int) -> None:
    many = {f"each{number}": LONG for number in range(num_outputs)}
    assert len(leaving(worker(NEW, 0, free_tokens=1 << 30), **many)) == num_leaving


def test_an_output_leaves_for_nobody_who_did_not_take_it_from_where_it_is() -> None:
    missed, elsewhere = replace(LONG, asked=frozenset({Pair(OLD, OTHER)})), frozenset({Pair(NEW, OTHER)})
    targets = worker(NEW, 8000), worker(OTHER, 0)
    assert leaving(*targets, a=missed, b=LONG) == [(0, NEW), (1, OTHER)]
    assert leaving(worker(OTHER, 0), a=missed) == []
    assert leaving(*targets, a=replace(LONG, asked=elsewhere)) == [(0, OTHER)], "it was another worker's then"


@pytest.mark.parametrize("fields", [{"num_tokens": 2_000_000}, {"adapter": "tuned"}])
def test_outputs_that_fit_nowhere_hold_up_no_others(fields: dict[str, Any]) -> None:
    stuck, short = replace(LONG, **fields), replace(LONG, num_left_at_most=90)
    outputs = {**dict.fromkeys(range(LEAVING), stuck), 50: short, 51: short}
    found = departures({NEW: FREE}, outputs, lambda key, adapter: () if adapter else {NEW}, USUAL)
    assert found == [(50, NEW), (51, NEW)]


def test_successors_are_asked_for_once_for_a_worker_and_an_adapter() -> None:
    asked = list[tuple[int, str]]()

    def successors(key: int, adapter: str) -> set[int]:
        asked.append((key, adapter))
        return {NEW}

    own = [LONG, replace(LONG, adapter="tuned"), replace(LONG, worker_id=OTHER)]
    departures({NEW: FREE}, dict(enumerate(own * 20)), successors, USUAL)
    assert sorted(asked) == [(OLD, ""), (OLD, "tuned"), (OTHER, "")]
