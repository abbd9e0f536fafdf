"""What a worker answers to probes, from facts about its instances. Pure.

Live: every living instance's step loop, and the frontend's own loop, came round lately; a loop that has not begun
because the model loads is not judged. Ready: every instance is READY, takes requests, and is known to some router if
there is any. No peer's death and no load changes either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.health.probes import Verdict, judge_loops
from diptych.common.members.membership import State


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """One scheduler group as probes see it."""

    rank: int
    is_loaded: bool
    state: State
    not_ready: str  # why it is not READY although it is loaded
    paused: str  # why it takes nothing new for a moment; empty: it does
    num_routers: int  # that have acknowledged it
    beat_s: float | None  # when its step loop last came round; None: it has not begun


def live(instances: Sequence[InstanceFacts], frontend_beat_s: float, now_s: float, stall_s: float) -> Verdict:
    beats = {f"the step loop{_of(i, instances)}": i.beat_s for i in instances} | {"the frontend": frontend_beat_s}
    return judge_loops({name: now_s - beat_s for name, beat_s in beats.items() if beat_s is not None}, stall_s)


def startup(instances: Sequence[InstanceFacts], loading_s: float) -> Verdict:
    """`loading_s`: since the process began."""
    loading = [f"loading the model{_of(each, instances)}" for each in instances if not each.is_loaded]
    return Verdict(False, f"{loading[0]}, for {loading_s:.0f} s so far") if loading else Verdict(True, "loaded")


def ready(instances: Sequence[InstanceFacts], num_known_routers: int) -> Verdict:
    problems = ((each, _problem(each, num_known_routers)) for each in instances)
    words = [f"{problem}{_of(each, instances)}" for each, problem in problems if problem]
    return Verdict(not words, words[0] if words else "takes requests")


def _problem(instance: InstanceFacts, num_known_routers: int) -> str:
    if not instance.is_loaded:
        return "the model is loading"
    if instance.state >= State.DRAINING:
        return "draining"
    if instance.state is State.STARTING or instance.not_ready:
        return instance.not_ready or "starting"
    if instance.paused:
        return f"paused: {instance.paused}"
    if num_known_routers and not instance.num_routers:
        return f"no router has acknowledged this worker yet (known: {num_known_routers})"
    return ""


def _of(instance: InstanceFacts, instances: Sequence[InstanceFacts]) -> str:
    return f" of data-parallel rank {instance.rank}" if len(instances) > 1 else ""
