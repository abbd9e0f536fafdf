"""Pods of workers and the Deployments that make them, as the Kubernetes API lists them, read into values. Pure.

Rule: a pool that somebody else scales, or that changes just now, is left alone, and it is said why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from diptych.common.members.roles import Role
from diptych.planner.values import PLANNED_ROLES, WorkerState

Object = Mapping[str, Any]
PoolKey = tuple[str, str]  # role and name, by the labels of pods and Deployments

ROLE_LABEL: Final = "diptych.io/role"
POOL_LABEL: Final = "diptych.io/pool"
NODE_LABELS: Final = ("leaderworkerset.sigs.k8s.io/worker-index", "apps.kubernetes.io/pod-index")  # of a group's pods
MOST_RESTARTS: Final = 3  # of a worker that has never been ready: it does not start
HOPELESS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
_ROLES: Final = {role.value: role for role in PLANNED_ROLES}


class WorkerPod(NamedTuple):
    """A pod of a worker."""

    name: str
    pod_id: int  # that nobody else has; 64 bits
    pool: PoolKey
    role: Role  # that it began with
    state: WorkerState  # as far as Kubernetes knows: READY is for its worker to say
    rank: int  # Kubernetes ends those first whose number is lower, when the pool shrinks
    is_group: bool = False  # its worker has pods beside it, which are none of their own


class Pool(NamedTuple):
    """A Deployment of workers."""

    name: str
    key: PoolKey
    role: Role  # that its workers begin with
    replicas: int  # that were asked for
    version: str  # of what was read: who writes says it, and is refused if somebody else was faster
    hands_off: str = ""  # why it may not be scaled now; empty: it may


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything of a release."""

    pods: tuple[WorkerPod, ...] = ()
    pools: tuple[Pool, ...] = ()

    def live(self, pool: Pool) -> tuple[WorkerPod, ...]:
        """Return the pods of a pool that count for its replicas."""
        return tuple(each for each in self.pods if each.pool == pool.key and each.state is not WorkerState.DRAINING)

    def missing(self, pool: Pool) -> tuple[int, ...]:
        """Return an id for each replica that was asked for and has no pod yet."""
        return tuple(number_of(f"{pool.name} {n}") for n in range(pool.replicas - len(self.live(pool))))


RANK_MISSING: Final = -1  # a replica without a pod
RANK_UNPLACED: Final = 0
RANK_PENDING: Final = 1
RANK_NOT_READY: Final = 2
RANK_READY: Final = 3


def number_of(text: str) -> int:
    """Return a number of 64 bits for a name."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def pods_of(listed: Iterable[Object]) -> tuple[WorkerPod, ...]:
    """Return the pods of workers; those that have ended hold nothing, and are left out."""
    return tuple(
        pod for each in listed if each["status"].get("phase") not in ("Failed", "Succeeded") for pod in _pod(each)
    )


def _pod(listed: Object) -> Iterable[WorkerPod]:
    """Yield the pod of a worker; of a worker over several nodes that of its first node."""
    metadata = listed["metadata"]
    key, node = _key(metadata), _node(metadata)
    if key is not None and node in ("", "0"):
        rank, name, pod_id = _rank(listed), metadata["name"], number_of(metadata["uid"])
        yield WorkerPod(name, pod_id, key, _ROLES[key[0]], _state(listed, rank), rank, is_group=node != "")


def _node(metadata: Object) -> str:
    """Return the number of a node in its group, as the chart tells it to the pod; empty: it is no node of a group."""
    labels = metadata.get("labels") or {}
    return next((labels[each] for each in NODE_LABELS if each in labels), "")


def _key(metadata: Object) -> PoolKey | None:
    labels = metadata.get("labels") or {}
    role = labels.get(ROLE_LABEL, "")
    return (role, labels.get(POOL_LABEL, "")) if role in _ROLES else None


def _rank(pod: Object) -> int:
    """Return its place in the ReplicaSet controller's order; among equals others count, such as deletion costs."""
    if not pod["spec"].get("nodeName"):
        return RANK_UNPLACED
    if pod["status"].get("phase") == "Pending":
        return RANK_PENDING
    conditions = pod["status"].get("conditions") or ()
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return RANK_READY if is_ready else RANK_NOT_READY


def _state(pod: Object, rank: int) -> WorkerState:
    if pod["metadata"].get("deletionTimestamp"):
        return WorkerState.DRAINING
    if rank == RANK_UNPLACED:
        return WorkerState.PENDING
    statuses = [*(pod["status"].get("initContainerStatuses") or ()), *(pod["status"].get("containerStatuses") or ())]
    waits_for = {((each.get("state") or {}).get("waiting") or {}).get("reason") for each in statuses}
    restarts = max((each.get("restartCount", 0) for each in statuses), default=0)
    if rank != RANK_READY and (waits_for & HOPELESS or restarts >= MOST_RESTARTS):
        return WorkerState.FAILED
    return WorkerState.STARTING


def pools_of(
    deployments: Iterable[Object], autoscalers: Iterable[Object], scaled_objects: Iterable[Object]
) -> tuple[Pool, ...]:
    """Return the pools, by name. `autoscalers` are HPAs, `scaled_objects` KEDA's."""
    scaled_by = _scaled(scaled_objects, "KEDA's ScaledObject") | _scaled(autoscalers, "the HPA")
    found = [pool for each in deployments for pool in _pool(each, scaled_by)]
    return tuple(sorted(found, key=lambda pool: pool.name))


def _scaled(scalers: Iterable[Object], kind: str) -> dict[str, str]:
    """Return who scales a Deployment, by its name."""
    targets = [(each["spec"].get("scaleTargetRef") or {}, each["metadata"]["name"]) for each in scalers]
    return {
        target.get("name", ""): f"{kind} {name} scales it"
        for target, name in targets
        if target.get("kind", "Deployment") == "Deployment"
    }


def _pool(listed: Object, scaled_by: Mapping[str, str]) -> Iterable[Pool]:
    metadata = listed["metadata"]
    key = _key(metadata)
    if key is not None:
        hands_off = scaled_by.get(metadata["name"], "") or _unrest(listed)
        replicas = listed["spec"].get("replicas", 1)
        yield Pool(metadata["name"], key, _ROLES[key[0]], replicas, metadata["resourceVersion"], hands_off)


def _unrest(deployment: Object) -> str:
    """Say what keeps a Deployment from being scaled for a while: pods of two revisions, of which either may go."""
    metadata, spec, status = deployment["metadata"], deployment["spec"], deployment.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "it is being deleted"
    if spec.get("paused"):
        return "its rollout is paused"
    is_seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    if not is_seen or status.get("updatedReplicas", 0) < status.get("replicas", 0):
        return "a rollout is under way"
    return ""
