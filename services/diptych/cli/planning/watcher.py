"""What a planner is shown of a running platform, round after round, and what is kept from one to the next."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final

from diptych.cli.planning.config import MANY, PlannerConfig
from diptych.common.members.instances import computable_tokens
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.engine.values.step_model import StepModel
from diptych.planner.counters import Counts, Lens, Sample, attained_by, lens_by, offered_by
from diptych.planner.planner import Planner
from diptych.planner.pools.cluster import Cluster
from diptych.planner.pools.orders import Scene
from diptych.planner.pools.start_times import StartTimes
from diptych.planner.values import (
    NO_WORKERS,
    PLANNED_ROLES,
    Capacity,
    Limits,
    Memory,
    Observed,
    Occupancy,
    Plan,
    Sizes,
    Worker,
    WorkerState,
)
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

NOTHING: Final = Cluster()
SERVING: Final = (Sizes(0, 0, 1), Sizes(1, 1, 0))  # the fewest workers that serve
USUAL: Final = Lens(1000.0, 0.0, 100.0)  # that requests are taken for until one has finished: a guess
_STATES: Final = {
    State.STARTING: WorkerState.STARTING,
    State.READY: WorkerState.READY,
    State.DRAINING: WorkerState.DRAINING,
}

Mark = tuple[int, WorkerState, Role]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found out for a round."""

    now_s: float
    listed: tuple[Instance, ...]  # by bootstrap
    routers: Mapping[str, Counts | None]
    only_here_pages: Mapping[int, int] = field(default_factory=dict)  # by instance id; who is missing is not known
    cluster: Cluster = NOTHING
    flipping: Mapping[int, Role] = field(default_factory=dict)  # workers that change their role just now, to which
    unix_ns: int = 0  # time of day; 0: not known, and so are ages

    @property
    def ages_s(self) -> Mapping[int, float]:
        """Return for how long instances have been there whose start is known, by instance id."""
        started = {each.instance_id: each.started_unix_ns for each in self.listed if each.started_unix_ns}
        return {each: (self.unix_ns - began_ns) / 1e9 for each, began_ns in started.items() if self.unix_ns}


@dataclass(slots=True)
class Watcher:
    """What is kept of a platform from one round to the next, beside the planner's own memory."""

    config: PlannerConfig
    step_model: StepModel
    planner: Planner = field(default_factory=Planner)
    samples: list[Sample] = field(default_factory=list)
    since_s: dict[Mark, float] = field(default_factory=dict)
    starts: StartTimes = field(default_factory=StartTimes)
    lens: Lens = USUAL  # of requests, lately
    num_pages: int = MANY  # of a KV pool, as the last worker said that said something; a guess before
    last: Plan | None = None

    def round(self, seen: Seen) -> Scene:
        """Return what is planned for what there is now, and who is there; log it where it is something new."""
        kept = [
            each for each in self.samples if each.at_s >= seen.now_s - self.config.stable_s - self.config.interval_s
        ]
        self.samples = [*kept, Sample(seen.now_s, seen.routers)]
        self.lens = lens_by(self.samples) or self.lens
        before, workers, pod_of = self.planner.memory, self._workers(seen), pods_of_workers(seen)
        self.starts.look(seen.now_s, {pod_of.get(each.worker_id, str(each.worker_id)): each.state for each in workers})
        made = self.planner(self._observed(seen, workers))
        if not self.config.act:
            self.planner.memory = _unheard(self.planner.memory, before)
        if self.last is None or (made.sizes, made.roles, made.why) != (self.last.sizes, self.last.roles, self.last.why):
            logger.info("%s: %s", made.sizes, "; ".join(f"[{each.why.value}] {each.words}" for each in made.reasons))
        self.last = made
        return Scene(made, workers, pod_of, seen.cluster)

    @property
    def capacity(self) -> Capacity:
        """Return what a worker can do, as far as is known."""
        return Capacity(self.step_model, self.num_pages * self.config.page_size, num_gpus=self.config.tp)

    def _observed(self, seen: Seen, workers: tuple[Worker, ...]) -> Observed:
        self.num_pages = max((each.load.total_pages for each in seen.listed), default=0) or self.num_pages
        num_queued, num_waiting = _queued(seen)
        return Observed(
            seen.now_s,
            workers,
            offered_by(self.samples, self.config.windows_s, self.lens),
            self.config.goal,
            self.capacity,
            self._limits(seen, workers),
            num_queued,
            round(num_waiting * (self.lens.prompt - self.lens.cached)),
            attained=attained_by(self.samples, self.config.stable_s),
            start_s=self.starts.usual_s(self.config.start_s),
        )

    def _limits(self, seen: Seen, workers: tuple[Worker, ...]) -> Limits:
        """Allow no more workers of a role that no pool begins with than there are: nobody could start them.

        Of those that pools begin with so many stay that requests can be served: with nobody there, none would finish.
        """
        limits, roles = self.config.limits, {pool.role for pool in seen.cluster.pools}
        if not roles:
            return limits
        there = Sizes(*(sum(each.role is role for each in workers) for role in PLANNED_ROLES))
        most = limits.most or Sizes(MANY, MANY, MANY)
        most = Sizes(*(most.of(each) if each in roles else there.of(each) for each in PLANNED_ROLES))
        return replace(limits, least=serving_floor(limits.least, roles, there), most=most)

    def _workers(self, seen: Seen) -> tuple[Worker, ...]:
        found = [*self._members(seen), *_coming(seen)]
        marks = {(each.worker_id, each.state, each.role): each for each in found}
        ages_s = {} if self.last else seen.ages_s
        self.since_s = {mark: self.since_s.get(mark, self._served_since_s(mark, seen.now_s, ages_s)) for mark in marks}
        return tuple(replace(each, since_s=self.since_s[mark]) for mark, each in marks.items())

    def _served_since_s(self, mark: Mark, now_s: float, ages_s: Mapping[int, float]) -> float:
        """Return since when a worker is as it is, that was not known so before; its age counts from its start on."""
        worker_id, state, _ = mark
        age_s = ages_s.get(worker_id, 0.0) if state is WorkerState.READY else 0.0
        return now_s - max(0.0, age_s - self.config.start_s)

    def _members(self, seen: Seen) -> Iterable[Worker]:
        """Yield those that bootstrap lists, in the state that whoever knows more of them says."""
        pods = {each.name: each.state for each in seen.cluster.pods}
        usual = statistics.fmean(seen.only_here_pages.values()) if seen.only_here_pages else 0.0
        for member in seen.listed:
            if WORKER_ROLES.get(member.role) not in PLANNED_ROLES or State(member.state) not in _STATES:
                continue
            state = _state(_STATES[State(member.state)], pods.get(member.pod, WorkerState.STARTING))
            role = seen.flipping.get(member.instance_id, WORKER_ROLES[member.role])
            tokens = seen.only_here_pages.get(member.instance_id, usual) * self.config.page_size
            held = self._held(member) if member.HasField("load") else None
            yield Worker(member.instance_id, role, state, seen.now_s, held, only_here_tokens=tokens)

    def _held(self, member: Instance) -> Occupancy:
        load, output_len = member.load, self.lens.output
        tokens = max(0, load.total_pages - load.free_pages - load.window_pages) * self.config.page_size
        left = load.num_running * output_len / 2 + load.num_waiting * output_len
        return Occupancy(load.num_running, load.num_waiting, computable_tokens(load), tokens, left)


def serving_floor(least: Sizes, roles: Set[Role], there: Sizes) -> Sizes:
    """Return the floor with as many more of the roles that pools begin with as it takes to serve at all.

    That is one worker that does both, or one of each: what lacks the fewest workers of what is there.
    """
    if least.of_roles(roles).serves:
        return least
    serving = [each for each in SERVING if each.of_roles(roles) == each]
    missing = [sum(max(0, want - have) for want, have in zip(each, there, strict=True)) for each in serving]
    added = min(zip(missing, serving, strict=True), key=lambda each: each[0], default=(0, NO_WORKERS))[1]
    return Sizes(*map(max, least, added))


def _queued(seen: Seen) -> tuple[int, int]:
    """Return how many requests no worker has, and how many of them routers have not let in yet, as far as is known.

    Workers tell what they hold: what routers have beyond it is on its way to one, or finds none.
    """
    counts = [each for each in seen.routers.values() if each is not None]
    waiting = round(sum(each.waiting for each in counts))
    serving = [each for each in seen.listed if WORKER_ROLES.get(each.role) in PLANNED_ROLES]  # encode workers hold none
    held = sum(each.load.num_running + each.load.num_waiting for each in serving)
    return max(waiting, round(sum(each.in_flight for each in counts)) - held), waiting


def _state(told: WorkerState, pod: WorkerState) -> WorkerState:
    """Return the state of a worker by its own word and its pod's: one whose pod ends leaves, whatever it says."""
    if pod is WorkerState.DRAINING or (told is WorkerState.STARTING and pod is WorkerState.FAILED):
        return pod
    return told


def _coming(seen: Seen) -> Iterable[Worker]:
    """Yield those that are no members: pods without a worker yet, and replicas without a pod."""
    there = {each.pod for each in seen.listed}
    for pod in seen.cluster.pods:
        if pod.name not in there:
            yield Worker(pod.pod_id, pod.role, pod.state, seen.now_s)
    for pool in seen.cluster.pools:
        for number in seen.cluster.missing(pool):
            yield Worker(number, pool.role, WorkerState.PENDING, seen.now_s)


def pods_of_workers(seen: Seen) -> Mapping[int, str]:
    """Return the pod that each worker runs in, or is."""
    there = {each.instance_id: each.pod for each in seen.listed if each.pod and each.role in WORKER_ROLES}
    return there | {each.pod_id: each.name for each in seen.cluster.pods if each.name not in there.values()}


def _unheard(memory: Memory, before: Memory) -> Memory:
    """Return what a planner remembers whose plans nobody carries out: what it saw, not what it asked for."""
    return replace(memory, asked=None, shrunk_s=before.shrunk_s, flipped_s=before.flipped_s)
