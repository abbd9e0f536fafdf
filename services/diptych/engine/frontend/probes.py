"""What a worker answers to probes, from facts about its instances. Pure.

Live: every living instance's step loop, and the frontend's own loop, came round lately; a loop that has not begun
because the model loads is not judged. Ready: every instance is READY, takes requests, is heard, and is known to some
router if there is any. No peer's death and no load changes either.

`Readiness` decides when an instance says READY in its record: once the model is loaded and a link to some peer has
passed its test. That is sticky: who loses its peers later stays READY, and routers see what is linked. An instance that
serves whole requests waits for nobody where it knows of nobody, and one that makes vectors never waits. Nothing else
moves a record from STARTING to READY. Another role needs other links: until one is up a record that is READY says why
it can't serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, LegKind, Role
from diptych.common.verdicts.probes import Verdict, judge_loops
from diptych.engine.frontend.silence import silence_words
from diptych.kvtransfer.lanes import Requirement
from diptych.v1 import bootstrap_pb2


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """One scheduler group as probes see it."""

    rank: int
    is_loaded: bool
    state: State
    not_ready: str  # why it is not READY although it is loaded
    paused: str  # why it takes nothing new for a moment; empty: it does
    silent_s: int  # since its step loop was heard; 0: it is, or a step may well take so long
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
    if instance.silent_s:
        return silence_words(instance.silent_s)
    if num_known_routers and not instance.num_routers:
        return f"no router has acknowledged this worker yet (known: {num_known_routers})"
    return ""


def _of(instance: InstanceFacts, instances: Sequence[InstanceFacts]) -> str:
    return f" of data-parallel rank {instance.rank}" if len(instances) > 1 else ""


class Readiness:
    """Keeps `state` and `not_ready` of a record up to READY. Methods return whether something changed."""

    def __init__(self, instance: bootstrap_pb2.Instance) -> None:
        self._instance = instance
        self._needs_peers = True

    @property
    def is_pending(self) -> bool:
        """Loaded, and only waiting for a link."""
        return bool(self._instance.not_ready)

    def loaded(self, requirement: Requirement) -> None:
        """The model is loaded. Only links that meet `requirement` count. Who drains already waits for none."""
        if self._instance.state != bootstrap_pb2.INSTANCE_STATE_STARTING:
            return
        limit = "" if requirement == "any" else f", and --kv-require asks for {requirement}"
        self._instance.not_ready = f"no peer is linked yet{limit}"

    def loaded_alone(self) -> None:
        """The model is loaded, and makes no text: who computes prompts needs nobody."""
        self._needs_peers = False
        if self._instance.state == bootstrap_pb2.INSTANCE_STATE_STARTING:
            self.role_changed()

    def failed(self, problem: str) -> bool:
        """Links are tried without success."""
        if self.is_pending and problem:
            self._instance.not_ready = " ".join(problem.split())  # one line, whoever's words they are
            return True
        return False

    def linked(self, num_links: int) -> bool:
        """So many links have passed their test."""
        return self.is_pending and num_links > 0 and self._become_ready()

    def knows_peers(self, num_peers: int) -> bool:
        """Membership lists so many peers."""
        alone = (bootstrap_pb2.ROLE_UNIFIED, bootstrap_pb2.ROLE_ENCODE)  # nobody depends on who encodes images
        serves_alone = self._instance.role in alone and num_peers == 0
        return self.is_pending and serves_alone and self._become_ready()

    def role_changed(self) -> None:
        """Another role is served: links count anew."""
        role = WORKER_ROLES[self._instance.role]
        if not self._needs_peers and role.serves(LegKind.POOL):
            self._become_ready()
            return
        needed = " or ".join(other.value for other in Role if role.exchanges_with(other))
        self._instance.not_ready = f"no {needed} worker is linked, since it serves {role.value}"

    def _become_ready(self) -> bool:
        self._instance.not_ready = ""
        self._instance.state = max(self._instance.state, bootstrap_pb2.INSTANCE_STATE_READY)
        return True
