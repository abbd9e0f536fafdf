"""What the Kubernetes API lists, read as pods and pools of workers."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.common.members.roles import Role
from diptych.planner.pools.cluster import (
    RANK_NOT_READY,
    RANK_PENDING,
    RANK_READY,
    RANK_UNPLACED,
    Cluster,
    Pool,
    pods_of,
    pools_of,
)
from diptych.planner.values import WorkerState

WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
LABELS = {"diptych.io/role": "decode", "diptych.io/pool": "default"}


def pod(node: str = "n", phase: str = "Running", ready: bool = False, **status: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": "p", "uid": "u", "labels": LABELS},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "conditions": conditions, **status},
    }


def container(restarts: int = 0, waiting: str = "") -> dict[str, Any]:
    return {"restartCount": restarts, "state": {"waiting": {"reason": waiting}} if waiting else {"running": {}}}


@pytest.mark.parametrize(
    ("listed", "state", "rank"),
    [
        (pod(node="", phase="Pending"), WorkerState.PENDING, RANK_UNPLACED),
        (pod(phase="Pending"), WorkerState.STARTING, RANK_PENDING),
        (pod(phase="Pending", containerStatuses=[container(waiting="ImagePullBackOff")]), WorkerState.FAILED, 1),
        (pod(phase="Pending", containerStatuses=[container(waiting="ContainerCreating")]), WorkerState.STARTING, 1),
        (pod(phase="Pending", initContainerStatuses=[container(waiting="CrashLoopBackOff")]), WorkerState.FAILED, 1),
        (pod(containerStatuses=[container()]), WorkerState.STARTING, RANK_NOT_READY),
        (pod(containerStatuses=[container(restarts=2)]), WorkerState.STARTING, RANK_NOT_READY),
        (pod(containerStatuses=[container(restarts=3)]), WorkerState.FAILED, RANK_NOT_READY),
        (pod(ready=True, containerStatuses=[container(restarts=9)]), WorkerState.STARTING, RANK_READY),
    ],
)
def test_a_pod_is_as_far_as_kubernetes_knows(listed: dict[str, Any], state: WorkerState, rank: int) -> None:
    (found,) = pods_of([listed])
    assert (found.state, found.rank, found.role, found.pool) == (state, rank, Role.DECODE, ("decode", "default"))


def test_a_pod_that_ends_leaves_and_one_that_has_ended_or_is_no_worker_is_not_there() -> None:
    leaving = pod(ready=True)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert [each.state for each in pods_of([leaving])] == [WorkerState.DRAINING]
    router = pod()
    router["metadata"]["labels"] = {"app.kubernetes.io/component": "router"}
    assert pods_of([pod(phase="Failed"), pod(phase="Succeeded"), router]) == ()


@pytest.mark.parametrize(
    "labels",
    [
        # the pods of leaders are of one StatefulSet, where they are numbered by groups
        [
            {"leaderworkerset.sigs.k8s.io/worker-index": str(each), "apps.kubernetes.io/pod-index": "1"}
            for each in (0, 1)
        ],
        [{"apps.kubernetes.io/pod-index": str(each), "diptych.io/group": "1"} for each in (0, 1)],
    ],
)
def test_the_pods_of_a_group_are_one_worker(labels: list[dict[str, str]]) -> None:
    nodes = [pod(ready=True), pod(ready=True)]
    for node, name, own in zip(nodes, ("g-1", "g-1-1"), labels, strict=True):
        node["metadata"] = {"name": name, "uid": name, "labels": LABELS | own}
    assert [(each.name, each.is_group) for each in pods_of([*nodes, pod()])] == [("g-1", True), ("p", False)]


def deployment(name: str = "d", **status: int) -> dict[str, Any]:
    rest = {"observedGeneration": 4, "replicas": 2, "updatedReplicas": 2}
    return {
        "metadata": {"name": name, "labels": LABELS, "resourceVersion": "77", "generation": 4},
        "spec": {"replicas": 2},
        "status": rest | status,
    }


def scaler(target: str, kind: str = "Deployment") -> dict[str, Any]:
    return {"metadata": {"name": "s"}, "spec": {"scaleTargetRef": {"kind": kind, "name": target}}}


def test_a_pool_that_nobody_else_scales_may_be_scaled() -> None:
    others = [scaler("other"), scaler("d", "StatefulSet")]
    pool = Pool("d", ("decode", "default"), Role.DECODE, 2, "77")
    assert pools_of([deployment()], others, []) == (pool,)


@pytest.mark.parametrize(
    ("listed", "autoscalers", "scaled_objects", "words"),
    [
        (deployment(), [scaler("d")], [], "the HPA s scales it"),
        (deployment(), [], [scaler("d")], "KEDA's ScaledObject s scales it"),
        (deployment(updatedReplicas=1), [], [], "a rollout is under way"),
        (deployment(observedGeneration=3), [], [], "a rollout is under way"),
        (deployment() | {"spec": {"replicas": 2, "paused": True}}, [], [], "its rollout is paused"),
    ],
)
def test_a_pool_that_somebody_else_changes_is_left_alone(
    listed: dict[str, Any], autoscalers: list[Any], scaled_objects: list[Any], words: str
) -> None:
    (pool,) = pools_of([listed], autoscalers, scaled_objects)
    assert pool.hands_off == words


def test_replicas_without_a_pod_have_numbers_that_stay() -> None:
    pool = Pool("d", ("decode", "default"), Role.DECODE, 3, "77")
    one, none = Cluster(pods_of([pod(ready=True)]), (pool,)), Cluster((), (pool,))
    assert len(set(none.missing(pool))) == 3
    assert one.missing(pool) == none.missing(pool)[:2]
