"""What a plan asks of a cluster: new numbers of replicas, workers that drain, roles that change. Pure.

Kubernetes chooses which pods of a pool go when it shrinks: those without a place first, then those that are not ready.
So a worker that shall go is drained; once Kubernetes knows that its pod is not ready, the pool gets one replica less,
and that one goes. No right is needed for it but to scale.

Rule: a pool shrinks only by pods that may go, even if that is later; and it never shrinks and grows at once. Numbers of
replicas follow from the pods that are there, so what others change in between is where the next round goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diptych.common.members.roles import Role
from diptych.planner.pools.cluster import RANK_MISSING, Cluster, Pool
from diptych.planner.values import PLANNED_ROLES, Plan, Worker, WorkerState

_STAYS = (WorkerState.PENDING, WorkerState.STARTING, WorkerState.READY, WorkerState.FAILED)


class Scale(NamedTuple):
    """A pool gets another number of replicas."""

    pool: Pool
    replicas: int


class SetRole(NamedTuple):
    """A worker changes its role."""

    worker_id: int
    role: Role


class Orders(NamedTuple):
    """What is to be done, in any order, and what of the plan is left undone."""

    scales: tuple[Scale, ...] = ()
    drains: tuple[int, ...] = ()  # workers
    roles: tuple[SetRole, ...] = ()
    left: tuple[str, ...] = ()  # in words


@dataclass(frozen=True, slots=True)
class Scene:
    """A plan and what it was made from. `pod_of` names the pod that a worker runs in, or is."""

    plan: Plan
    workers: Sequence[Worker]
    pod_of: Mapping[int, str]
    cluster: Cluster

    @property
    def free(self) -> tuple[Pool, ...]:
        """Return the pools that may be scaled."""
        return tuple(each for each in self.cluster.pools if not each.hands_off)

    @property
    def free_pods(self) -> frozenset[str]:
        return frozenset(pod.name for pool in self.free for pod in self.cluster.live(pool))


def orders(scene: Scene) -> Orders:
    """Return what to do now, so that there is what the plan wants, soon or in later rounds."""
    scene = replace(scene, cluster=_without_groups(scene.cluster, scene.pod_of.values()))
    growth, lacking = _growth(scene)
    scales = (_scale(scene, pool, growth.get(pool.name, 0)) for pool in scene.free)
    ready = {each.worker_id for each in scene.workers if each.state is WorkerState.READY}
    is_ours = {each: scene.pod_of.get(each) in scene.free_pods for each in ready}
    return Orders(
        tuple(each for each in scales if each.replicas != each.pool.replicas),
        tuple(each for each in scene.plan.leaving if is_ours.get(each)),
        tuple(SetRole(*each) for each in scene.plan.roles if is_ours.get(each.worker_id)),
        (*lacking, *_left(scene, ready)),
    )


def _without_groups(cluster: Cluster, pods: Iterable[str]) -> Cluster:
    """Leave pools alone whose pods are several workers each: replicas are pods, and plans are of workers."""
    several = {name for name, number in Counter(pods).items() if number > 1}
    keys = {each.pool for each in cluster.pods if each.name in several}
    words = "its pods are several workers each (--dp)"
    pools = [each._replace(hands_off=each.hands_off or words) if each.key in keys else each for each in cluster.pools]
    return replace(cluster, pools=tuple(pools))


def _growth(scene: Scene) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Return how many more workers each pool gets, and what no pool can give."""
    roles = {each.worker_id: each.role for each in scene.plan.roles}
    gone = {*scene.plan.leaving}
    staying = Counter(
        roles.get(each.worker_id, each.role)
        for each in scene.workers
        if each.state in _STAYS and each.worker_id not in gone
    )
    growth, lacking = {}, []
    for role in PLANNED_ROLES:
        more = scene.plan.sizes.of(role) - staying[role]
        pools = sorted((each for each in scene.free if each.role is role), key=lambda pool: _troubles(scene, pool))
        if more > 0 and pools:
            growth[pools[0].name] = more
        elif more > 0:
            lacking.append(f"{more} more {role.value} workers are wanted, and no pool of that role may be scaled")
    return growth, tuple(lacking)


def _troubles(scene: Scene, pool: Pool) -> int:
    """Return how many pods of a pool have no place or do not start."""
    bad = (WorkerState.PENDING, WorkerState.FAILED)
    return sum(each.state in bad for each in scene.cluster.live(pool)) + len(scene.cluster.missing(pool))


def _scale(scene: Scene, pool: Pool, more: int) -> Scale:
    """Return how many replicas a pool gets: more, or fewer by those that Kubernetes would end and that may go.

    Pods beyond the replicas are about to be ended, and among those that may go: they count once.
    """
    there = max(pool.replicas, len(scene.cluster.live(pool)))
    return Scale(pool, pool.replicas + more if more else min(pool.replicas, there - _removable(scene, pool)))


def _removable(scene: Scene, pool: Pool) -> int:
    """Return by how many replicas a pool may shrink, so that only pods go that may."""
    worker_in = {pod: worker_id for worker_id, pod in scene.pod_of.items()}
    going = {*scene.plan.leaving, *(each.worker_id for each in scene.workers if each.state is WorkerState.DRAINING)}
    ranks = [(each.rank, worker_in.get(each.name, each.pod_id)) for each in scene.cluster.live(pool)]
    ranks += [(RANK_MISSING, each) for each in scene.cluster.missing(pool)]
    serving = {each.worker_id for each in scene.workers if each.state is WorkerState.READY}
    number = 0
    for rank in sorted({rank for rank, _ in ranks}):
        members = [worker_id for each, worker_id in ranks if each == rank]
        if not all(each in going and each not in serving for each in members):
            break
        number += len(members)
    return number


def _left(scene: Scene, ready: set[int]) -> Iterable[str]:
    """Say of pools that are left alone what they should be, and of workers in no pool that they stay."""
    pools = {pod.name: pool for pool in scene.cluster.pools for pod in scene.cluster.live(pool)}
    wanted = {*scene.plan.leaving, *(each.worker_id for each in scene.plan.roles)}
    homeless = [each for each in wanted & ready if scene.pod_of.get(each) not in pools]
    yield from (f"{pool.name} is left alone: {pool.hands_off}" for pool in scene.cluster.pools if pool.hands_off)
    yield from (
        f"the pool {name} of {role} is left alone: each worker is a group of pods (nodes.count); set replicas"
        for role, name in sorted({pod.pool for pod in scene.cluster.pods if pod.is_group})
    )
    if homeless:
        names = ", ".join(f"{each:016x}" for each in sorted(homeless))
        yield f"workers {names} run in no pod of a pool, and stay as they are"
