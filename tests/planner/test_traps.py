"""Traps that other schedulers and planners fell into, as far as a planner can."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from planner_world import H200, World, fixed

from diptych.common.members.roles import Role
from diptych.planner.demand import demand
from diptych.planner.flips import ROUNDS, WORTH, Case, flips
from diptych.planner.offered import Asked, offered
from diptych.planner.plan import plan
from diptych.planner.predict import predict
from diptych.planner.sizing import Room, Sizing
from diptych.planner.values import (
    Goal,
    Kind,
    Limits,
    Memory,
    Observed,
    Occupancy,
    Offered,
    Sizes,
    Why,
    Worker,
    WorkerState,
)

GOAL = Goal(1.0, 0.03, 0.9)
IDLE = Occupancy(0, 0, 0, 0, 0.0)


def seen(workers: tuple[Worker, ...], *kinds: Kind, budget_gpus: int = 8) -> Observed:
    """What a planner sees of a load that has long been the same."""
    windows = tuple(Offered(each, kinds) for each in (60.0, 300.0))
    return Observed(10_000.0, workers, windows, GOAL, H200, Limits(budget_gpus=budget_gpus))


def worker(number: int, role: Role = Role.UNIFIED, held: Occupancy = IDLE, cached: float = 0.0) -> Worker:
    return Worker(number, role, WorkerState.READY, 0.0, held, only_here_tokens=cached)


def test_who_runs_counts_and_not_only_who_waits() -> None:
    """Trap 1: estimates from the waiting queue were wrong 905 times over: a prompt of 60,000 tokens ran."""
    chat = Kind(1.0, 500, 0, 100)
    calm, _ = plan(seen((worker(1),), chat), Memory())
    runs = Occupancy(
        num_running=40, num_waiting=0, prompt_tokens_left=48 * 60_000, context_tokens=0, output_tokens_left=0
    )
    full, _ = plan(seen((worker(1, held=runs),), chat), Memory())
    assert calm.both == 1
    assert full.sizes.total > 1
    assert Why.BACKLOG in full.why


def test_requests_in_flight_are_load_before_any_of_them_ends() -> None:
    """Trap 2: feedback at completion came when 81 % of a run was over."""
    running = [Asked(10.0 + n, 4000, 0, 300, is_over=False) for n in range(50)]
    (window,) = offered(running, 60.0, [60.0])
    assert window.requests_per_s == pytest.approx(50 / 60)
    assert window.kinds == (Kind(50 / 60, 4000, 0, 600),)
    ended = [Asked(-5.0, 4000, 0, length, is_over=True) for length in (100, 500, 1000)]
    (window,) = offered([*running, *ended], 60.0, [60.0])
    assert window.kinds == (Kind(50 / 60, 4000, 0, 750),)  # those that were longer than 300


def test_long_prompts_are_weighed_by_whom_they_delay() -> None:
    """Trap 3: a long prompt keeps its own goal, and makes a hundred short ones miss theirs."""
    small, large = Kind(5.0, 500, 0, 50), Kind(0.5, 16_000, 0, 50)
    tight = Goal(0.3, 0.03, 0.9)
    alone = predict(H200, Sizes(1, 1, 0), demand((small,), H200), tight)
    mixed = demand((small, large), H200)
    beside = predict(H200, Sizes(1, 1, 0), mixed, tight)
    ((_, prompts),) = beside.prompts
    kept = prompts.wait.within(tight.ttft_s - prompts.own_s(mixed.costs[0]))
    assert alone.kept > 0.99
    assert kept < 0.95
    assert prompts.busy < 0.5  # nobody is overloaded: it is the length


def test_what_is_kept_is_a_share_of_the_requests_that_were_offered() -> None:
    """Trap 4: no violations among those who finish, because few do."""
    chat = Kind(100.0, 2000, 0, 100)
    assert predict(H200, Sizes(both=1), demand((chat,), H200), GOAL).kept == 0.0
    made, _ = plan(seen((worker(1),), chat, budget_gpus=1), Memory())
    assert Why.HOLDS not in made.why
    assert 0 < made.admission.requests_per_s < 20


def test_each_overhead_is_predicted_once() -> None:
    """Trap 6: a simulator counted an overhead twice and forgot a queue: here formula and events agree."""
    kind, goal = Kind(2.0, 4000, 0, 100), Goal(1.0, 0.03, 0.9)
    demanded = demand((kind,), H200)
    for sizes in (Sizes(1, 1, 0), Sizes(both=1)):
        world = World(goal=goal, every_s=math.inf if sizes.both else 1e9).has(sizes).run(400, 2.0, fixed(4000, 100))
        waits = sorted(each.first_s - each.arrival_s for each in world.all if each.arrival_s < 380)
        predicted = predict(H200, sizes, demanded, goal)
        for share in (0.5, 0.9):
            assert predicted.ttft_s(demanded, share) == pytest.approx(waits[int(share * len(waits))], rel=0.25)


@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_one_less_is_asked_to_hold_all_of_the_load(number: int) -> None:
    """Trap 7: (n - 1) / n in whole numbers is 0, and thresholds collapse."""
    sizing, unit = Sizing(H200, GOAL), demand((Kind(1.0, 4000, 0, 100),), H200)
    most = sizing.held(Sizes(both=number - 1), unit.times(4 * number)) * 4 * number  # what one less holds
    there = tuple(map(worker, range(number)))
    below, above = (seen(there, Kind(most * part / 1.2, 4000, 0, 100)) for part in (0.97, 1.03))
    memory = Memory(began_s=0.0)
    assert plan(below, memory)[0].both == number - 1
    assert plan(above, memory)[0].both == number


def test_flips_are_worth_more_than_three_of_them_in_several_rounds_in_a_row() -> None:
    """Trap 7: a threshold is crossed or it is not, and hysteresis is all of the last rounds *and* a pause."""
    load = demand((Kind(9.0, 8000, 0, 50),), H200)
    sizing, sizes = Sizing(H200, Goal(1.0, 0.012, 0.9)), Sizes(1, 3, 0)
    ready = (worker(1, Role.PREFILL), *(worker(n, Role.DECODE) for n in (2, 3, 4)))
    observed = seen(ready, Kind(9.0, 8000, 0, 50))
    case = Case(sizes, Room(Sizes(1, 1, 0), Sizes(8, 8, 0), 4), load, load, sizing, 1e6)
    better = sizing.best(load, case.room)
    gain = (min(1.0, sizing.held(better, load)) - sizing.held(sizes, load)) * 9.0 * 600
    each_s = gain / WORTH / 2 / (9.0 / 4)  # two flips that cost a third of the gain: exactly not worth it
    assert better == Sizes(3, 1, 0)
    assert flips(case, replace(observed, flip_s=each_s * 1.0001), Memory()).memory.flip_rounds == 0
    memory, chosen = Memory(), []
    for number in range(1, ROUNDS + 1):
        found = flips(case, replace(observed, flip_s=each_s * 0.999, now_s=1e6 + number), memory)
        memory, chosen = found.memory, list(found.flips)
        assert bool(chosen) == (number == ROUNDS)
    assert [each.role for each in chosen] == [Role.PREFILL]
    other = replace(memory, flip_way=(Role.PREFILL, Role.DECODE), flip_rounds=ROUNDS - 1)
    assert flips(case, replace(observed, now_s=3e6), other).memory.flip_rounds == 1  # another way begins anew
    again = replace(memory, flip_way=(Role.DECODE, Role.PREFILL), flip_rounds=ROUNDS)
    assert not flips(case, replace(observed, flip_s=10.0, now_s=memory.flipped_s + 5), again).flips  # pauses


def test_roles_are_compared_on_equal_hardware() -> None:
    """Trap 8: dedicated roles lose flexible capacity: a worker that does both counts as one, like any other."""
    rag = demand((Kind(8.0, 8000, 0, 20),), H200)
    sizing = Sizing(H200, Goal(1.0, 0.05, 0.9))
    held = {sizes: sizing.held(sizes, rag) for sizes in (Sizes(1, 1, 0), Sizes(2, 2, 0), Sizes(3, 1, 0), Sizes(both=4))}
    assert max(held, key=lambda sizes: held[sizes]) == Sizes(both=4)
    tight = Sizing(H200, Goal(1.0, 0.009, 0.9))
    talk = demand((Kind(6.0, 3000, 0, 300),), H200)
    assert tight.held(Sizes(1, 1, 0), talk) > tight.held(Sizes(both=2), talk)


def test_two_loads_of_equal_means_are_not_equal() -> None:
    """Trap 9: means of lengths hide that most prompts are short and some are very long, even of what they cost."""
    apart = demand((Kind(3.6, 1000, 0, 100), Kind(0.4, 31_000, 0, 100)), H200)
    even = demand((Kind(4.0, 5850, 0, 100),), H200)
    sizing = Sizing(H200, Goal(1.0, 0.03, 0.89))
    assert even.requests_per_s * even.work_s == pytest.approx(apart.requests_per_s * apart.work_s, rel=0.01)
    one = Sizes(both=1)
    assert sizing.held(one, even) > 1.2 * sizing.held(one, apart)


def test_prompts_get_the_time_in_which_outputs_read_weights() -> None:
    """A step has room for products in any case: as much as reads take, beyond what its constant with prompts takes."""
    read_s, model = 0.006, H200.step_model
    hidden = replace(H200, step_model=replace(model, step=model.prompt_step + read_s))
    beside = replace(
        H200, step_model=replace(model, step=model.prompt_step + read_s, prompt_step=model.prompt_step + read_s)
    )
    chat, goal = Kind(2.0, 1000, 0, 200), Goal(1.0, 0.03, 0.9)
    pieces = [predict(each, Sizes(both=1), demand((chat,), each), goal).piece_tokens for each in (hidden, beside)]
    assert (pieces[0] - pieces[1]) * model.prompt_token == pytest.approx(read_s, rel=0.05)
