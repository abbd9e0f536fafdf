"""How many workers of each role there shall be, of those that are there and may come; roles stay as they are. Pure.

Growing has one margin and shrinking a larger one, over the hardest load of a while, and over that of the next while if
it rises: so a load at the border between two sizes costs no turns. Whoever shrinks asks whether those that are left
hold all of the load, not whether those that are there have much to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from diptych.planner.backlog import PATIENCE_S
from diptych.planner.demand import Demand
from diptych.planner.room import clipped
from diptych.planner.sizing import Room, Sizing
from diptych.planner.starts import WARM_S, Fleet, came_s, is_cold
from diptych.planner.values import PLANNED_ROLES, Memory, Observed, Reason, Sizes, Why

GROW_MARGIN: Final = 1.1  # times the load that is grown for
SHRINK_MARGIN: Final = 1.2  # times the load that one less has to hold
EARLY_MARGIN: Final = 2.0  # likewise while the load has not been watched for long
HEAP_S: Final = WARM_S / 2  # in which first prompts are worked off that wait for caches alone
LEAST_SEEN: Final = 20.0  # requests; a load that pauses tells nothing
SHRINK_TURNS: Final = 5  # in the time for which a load must have been lower
SHRINK_PART: Final = 0.25  # of what is too much goes at once, one worker at least


class Sized(NamedTuple):
    """Sizes, and what is said and remembered of them."""

    sizes: Sizes
    memory: Memory
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a round knows before it decides."""

    observed: Observed
    workers: Fleet
    room: Room
    sizing: Sizing
    cautious: Sizing  # with the part of the goal that could be kept of the hardest load
    demand: Demand  # to be held when workers that are asked for now are ready
    present: Demand  # what comes now
    hardest: Demand  # of the last while
    later: Demand  # that comes at the end of the next one, if the load goes on rising
    prompts_s: float = 0.0  # of a worker's time, for the prompts that are there

    @property
    def stable_s(self) -> float:
        return self.observed.limits.stable_s

    @property
    def lasting(self) -> Demand:
        """Return what those must hold who are left when others go."""
        return harder(harder(self.hardest, self.later), self.demand)


def sized(scene: Scene, memory: Memory) -> Sized:
    """Return how many workers of each role there shall be, without changes of role."""
    current = clipped(scene.workers.counted, scene.room)
    watched_s = scene.observed.now_s - (scene.observed.now_s if memory.began_s is None else memory.began_s)
    if _nobody_asks(scene, watched_s):
        words = f"nobody has asked for anything in {scene.stable_s:.0f} s"
        return Sized(scene.room.least, memory, (Reason(Why.IDLE, words),))
    is_asleep = scene.observed.num_queued > 0 and not current.serves
    holds = scene.sizing.holds(current, scene.demand)
    if not holds and not is_asleep and is_cold(scene.observed, memory):
        return _warming(scene, current, memory)
    if is_asleep or not holds:
        return _grown(scene, current, memory)
    fewer = _shrunk(scene, current)
    if fewer != current:
        return _shrinking(scene, current, fewer, watched_s, memory)
    words = (
        f"{current} hold {scene.demand.requests_per_s:.2f} requests/s; one less would not hold "
        f"{scene.lasting.requests_per_s:.2f} with a margin, or may not be"
    )
    return Sized(current, memory, (Reason(Why.HOLDS, words),))


def _warming(scene: Scene, current: Sizes, memory: Memory) -> Sized:
    """Return as many workers as there are while caches fill; one more where a line lasts that no heap makes.

    A heap of first prompts is soon worked off. Whoever came behind the newest worker and waits for long is in a line:
    how long that will be nobody knows yet, so one worker comes, and the next one once that has had as much time.
    """
    words = f"{current} do not hold what came while their caches filled, which says little of what will come"
    if not _is_in_line(scene) or current != scene.workers.ready:
        return Sized(current, memory, (Reason(Why.WARMING, words),))
    more = [current.changed(each, current.of(each) + 1) for each in PLANNED_ROLES if current.of(each)]
    allowed = [each for each in more if each in scene.room]
    grown = max(allowed, key=lambda each: (scene.sizing.held(each, scene.demand), each), default=current)
    words += f"; but who came since the newest of them has waited for {HEAP_S:.0f} s, and the line is long"
    return Sized(grown, memory, (Reason(Why.WARMING if grown == current else Why.GROWS, words),))


def _is_in_line(scene: Scene) -> bool:
    """Whether who came since the newest worker waits for long, behind more prompts than are computed in time."""
    observed, ready = scene.observed, scene.workers.ready
    late_s = observed.goal.ttft_s or PATIENCE_S
    held = [each.occupancy for each in observed.workers if each.occupancy is not None]
    waits_s = min(observed.now_s - came_s(observed), max((each.longest_wait_s for each in held), default=0.0))
    return waits_s >= max(late_s, HEAP_S) and scene.prompts_s > late_s * (ready.prefill + ready.both)


def _shrinking(scene: Scene, current: Sizes, fewer: Sizes, watched_s: float, memory: Memory) -> Sized:
    """Return fewer workers, if the load was watched for long enough and the fleet has settled."""
    now_s, most_asked = scene.observed.now_s, f"{scene.hardest.requests_per_s:.2f} requests/s"
    just_now = now_s < max(memory.shrunk_s, came_s(scene.observed)) + scene.stable_s / SHRINK_TURNS
    if not _is_sure(scene, fewer, watched_s) or just_now:
        words = f"{fewer} would hold {most_asked}; watched for {watched_s:.0f} s, and the fleet "
        words += "changed just now" if just_now else "is as it was"
        return Sized(current, memory, (Reason(Why.WAITS_TO_SHRINK, words),))
    words = f"{fewer} hold {SHRINK_MARGIN:g} times the {most_asked} that were the most in {scene.stable_s:.0f} s"
    return Sized(fewer, replace(memory, shrunk_s=now_s), (Reason(Why.SHRINKS, words),))


def _is_sure(scene: Scene, fewer: Sizes, watched_s: float) -> bool:
    """Whether the load was watched for long enough: less is enough where much fewer would do."""
    if watched_s >= scene.stable_s:
        return True
    seen = scene.hardest.requests_per_s * watched_s
    is_known = watched_s >= scene.stable_s / SHRINK_TURNS and seen >= LEAST_SEEN
    return is_known and scene.cautious.holds(fewer, scene.lasting.times(EARLY_MARGIN))


def _nobody_asks(scene: Scene, watched_s: float) -> bool:
    """Whether there was no load for a while, and none is left."""
    demands = (scene.demand, scene.hardest)
    idle = watched_s >= scene.stable_s and all(
        each.requests_per_s <= 0 and not each.backlog and not each.extra_rows for each in demands
    )
    return idle and not scene.observed.num_queued


def _grown(scene: Scene, current: Sizes, memory: Memory) -> Sized:
    """Return the fewest workers, those that are there among them, that hold the load with a margin."""
    room = replace(scene.room, least=current)
    more = scene.sizing.smallest(scene.demand.times(GROW_MARGIN), room, current)
    rate = scene.demand.requests_per_s
    if more is not None:
        words = f"{current} do not hold {rate:.2f} requests/s; {more} do, with a margin of {GROW_MARGIN - 1:.0%}"
        return Sized(more, memory, (Reason(Why.GROWS, words),))
    most = scene.sizing.best(scene.demand, room)
    held = min(1.0, scene.sizing.held(most, scene.demand))
    why = Why.BUDGET if most.total >= scene.room.max_total else Why.CEILING
    words = f"{most} are the most that there may be, and hold {held:.0%} of {rate:.2f} requests/s"
    return Sized(most, memory, (Reason(why, words),))


def _shrunk(scene: Scene, current: Sizes) -> Sizes:
    """Return what is left when a part of what is too much has gone."""
    load = scene.lasting.times(SHRINK_MARGIN)
    room = replace(scene.room, most=current, max_total=current.total)
    enough = scene.cautious.smallest(load, room, current)
    if enough is None or enough == current:
        return current
    left = current
    for _ in range(max(1, math.floor((current.total - enough.total) * SHRINK_PART))):
        left = _one_less(scene, left, load)
    return left


def harder(one: Demand, other: Demand) -> Demand:
    """Return the demand that is more work; what is there already counts for either."""
    harder = max(one, other, key=lambda each: each.work)
    return replace(harder, backlog=max(one.backlog, other.backlog), extra_rows=max(one.extra_rows, other.extra_rows))


def _one_less(scene: Scene, sizes: Sizes, load: Demand) -> Sizes:
    """Return the sizes without one worker, of the role that is missed least; the same if each would be missed."""
    fewer = [sizes.changed(each, sizes.of(each) - 1) for each in PLANNED_ROLES if sizes.of(each)]
    held = [each for each in fewer if each in scene.room and scene.cautious.holds(each, load)]
    return max(held, key=lambda each: (scene.cautious.kept(each, load), each), default=sizes)
