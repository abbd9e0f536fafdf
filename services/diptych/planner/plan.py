"""Decides what shall be: how many workers of each role, who changes or goes, what is let in; and says why. Pure.

Each round begins with what is *there*, whoever made it so, and asks three things. Does it hold the load? If not, what
are the fewest that do, with a margin. If it does, would one less hold the most that was asked for lately, with a
larger margin: all of the load on those that are left. And would other roles serve better by so much that changing
them is worth it. No round waits for another one's target, so none can be waited for in vain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from diptych.common.members.roles import Role
from diptych.planner.backlog import with_backlog
from diptych.planner.correction import corrected
from diptych.planner.demand import demand
from diptych.planner.expect import Expected, expect, remembered
from diptych.planner.flips import Case, Flips, after_flips, flips
from diptych.planner.leaving import leaving
from diptych.planner.predict import predict
from diptych.planner.reach import reachable
from diptych.planner.resize import SHRINK_MARGIN, Scene, harder, sized
from diptych.planner.room import clipped, room_for
from diptych.planner.sizing import Room, Sizing
from diptych.planner.starts import Fleet, fleet, starts
from diptych.planner.values import (
    EVERYBODY,
    UNBOUNDED,
    Admission,
    Memory,
    Observed,
    Plan,
    Reason,
    Sizes,
    Why,
    WorkerState,
)

SHED_BELOW: Final = 0.95  # of the load that is held: less than that is no rounding


def plan(observed: Observed, memory: Memory) -> tuple[Plan, Memory]:
    """Return what shall be, and what to remember until the next round."""
    workers = fleet(observed)
    begun = starts(observed, workers, memory)
    room, bounds = room_for(observed, workers, begun)
    told = (*begun.reasons, *bounds, *_changed_by_others(workers, memory))
    memory = replace(memory, troubles=begun.troubles, troubled_ids=begun.troubled_ids)
    expected = expect(observed, memory)
    memory = replace(memory, unknown_since_s=expected.unknown_since_s)
    told = (*told, *expected.reasons)
    if expected.kinds is None:
        return _kept(observed, workers, room, memory, told)
    if expected.unknown_since_s is None:
        memory = remembered(memory, observed, expected.kinds, observed.limits.stable_s)
    scene, memory, seen = _scene(observed, workers, room, expected, memory)
    made, memory = _made(scene, memory)
    return replace(made, reasons=(*told, *seen, *made.reasons)), memory


def _changed_by_others(workers: Fleet, memory: Memory) -> tuple[Reason, ...]:
    """Say that there are other workers than were asked for: the plan goes on from what is there."""
    if memory.asked is None or all(have <= want for have, want in zip(workers.counted, memory.asked, strict=True)):
        return ()
    words = f"there are {workers.counted}, and {memory.asked} were asked for: planned from what there is"
    return (Reason(Why.CHANGED_BY_OTHERS, words),)


def _kept(
    observed: Observed, workers: Fleet, room: Room, memory: Memory, reasons: tuple[Reason, ...]
) -> tuple[Plan, Memory]:
    """Return a plan that changes nothing but what limits ask for: floors hold, whatever is known or not."""
    sizes = clipped(workers.counted, room)
    gone = leaving(observed, workers, sizes, ())
    return Plan(*sizes, leaving=gone, reasons=reasons), replace(memory, asked=sizes)


def _scene(
    observed: Observed, workers: Fleet, room: Room, expected: Expected, memory: Memory
) -> tuple[Scene, Memory, tuple[Reason, ...]]:
    """Return what the round knows, and what there is to say about it."""
    present = demand(expected.kinds or (), observed.capacity)
    hardest = demand(max(memory.needs, key=lambda need: need.work).kinds if memory.needs else (), observed.capacity)
    reached = reachable(observed.goal, present, observed.capacity)
    lasting = reachable(observed.goal, harder(present, hardest), observed.capacity)
    sizing, cautious = (Sizing(observed.capacity, each.goal) for each in (reached, lasting))
    memory, missed = corrected(observed, workers, harder(present, hardest), cautious, memory)
    backlog = with_backlog(observed, workers.ready, present.times(expected.rise * memory.correction), sizing)
    hardest, later = hardest.times(memory.correction), present.times(expected.later * memory.correction)
    scene = Scene(observed, workers, room, sizing, cautious, backlog.demand, present, hardest, later, backlog.prompts_s)
    return scene, memory, (*reached.reasons, *missed, *backlog.reasons)


def _made(scene: Scene, memory: Memory) -> tuple[Plan, Memory]:
    """Return what is to be done about it."""
    observed = scene.observed
    resized = sized(scene, memory)
    flipped = flips(_flip_case(scene, resized.sizes), observed, resized.memory)
    roles = {each.worker_id: each.role for each in observed.workers}
    sizes = after_flips(resized.sizes, tuple((roles[each.worker_id], each.role) for each in flipped.flips))
    if sizes not in scene.room:  # the fleet grows or shrinks at the same time: one after the other
        flipped, sizes = Flips((), resized.memory, ()), resized.sizes
    admission, shed = _admission(scene)
    made = Plan(
        *sizes,
        roles=flipped.flips,
        leaving=leaving(observed, scene.workers, sizes, flipped.flips),
        budgets=_budgets(scene),
        admission=admission,
        reasons=(*resized.reasons, *flipped.reasons, *shed),
    )
    return made, replace(flipped.memory, asked=sizes)


def _flip_case(scene: Scene, sizes: Sizes) -> Case:
    """Return the fleet that is there, to be judged: what is asked for helps only when it is ready."""
    cautious = harder(scene.hardest, scene.demand).times(SHRINK_MARGIN)
    comes = sizes != scene.workers.ready and scene.sizing.holds(sizes, scene.demand)
    growth_s = scene.observed.start_s if comes else math.inf
    return Case(scene.workers.ready, scene.room, scene.demand, cautious, scene.sizing, growth_s)


def _budgets(scene: Scene) -> tuple[tuple[int, int], ...]:
    """Return the tokens of prompts that a step of each ready worker may have; of one that can't keep up, nothing."""
    found = predict(scene.observed.capacity, scene.workers.ready, scene.present, scene.sizing.goal)
    is_whole = not scene.sizing.goal.tpot_s or found.piece_tokens >= scene.observed.capacity.max_step_tokens
    of_role = {Role.PREFILL: UNBOUNDED, Role.DECODE: 0}
    if is_whole or found.piece_tokens >= 1:
        of_role[Role.UNIFIED] = UNBOUNDED if is_whole else math.floor(found.piece_tokens)
    ready = [each for each in scene.observed.workers if each.state is WorkerState.READY]
    return tuple((each.worker_id, of_role[each.role]) for each in ready if each.role in of_role)


def _admission(scene: Scene) -> tuple[Admission, tuple[Reason, ...]]:
    """Return what may be let in now: what ready workers hold, where that is less than what comes."""
    ready, rate = scene.workers.ready, scene.present.requests_per_s
    if not ready.serves or rate <= 0:
        return EVERYBODY, ()
    held = scene.sizing.held(ready, scene.present)
    if not 0 < held < SHED_BELOW:
        return EVERYBODY, ()
    words = f"{ready} that are ready hold {held * rate:.2f} of {rate:.2f} requests/s"
    return Admission(held * rate), (Reason(Why.SHEDS, words),)
