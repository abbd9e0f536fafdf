"""Deletion costs: what a pod's is, and how it reaches the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from http_serving import serving
from kubernetes_server import Server

from diptych.cli.operate.deletion_costs import ANNOTATION, changes, deletion_costs, update
from diptych.common.members.kubernetes_api import KubernetesApi
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    ROLE_DECODE,
    ROLE_ROUTER,
    Instance,
    WorkerLoad,
)


def worker(pod: str, running: int, waiting: int = 0, *, draining: bool = False) -> Instance:
    state = INSTANCE_STATE_DRAINING if draining else INSTANCE_STATE_READY
    return Instance(role=ROLE_DECODE, pod=pod, state=state, load=WorkerLoad(num_running=running, num_waiting=waiting))


def test_the_emptier_a_worker_the_cheaper_its_pod_and_who_drains_is_cheapest() -> None:
    members = [worker("idle", 0), worker("one", 1), worker("busy", 40, 9), worker("leaving", 70, draining=True)]
    costs = deletion_costs([*members, Instance(role=ROLE_ROUTER, pod="router"), worker("", 3)])
    assert sorted(costs, key=lambda pod: costs[pod]) == ["leaving", "idle", "one", "busy"]


def test_the_instances_of_a_pod_count_together() -> None:
    assert deletion_costs([worker("a", 2), worker("a", 6)]) == deletion_costs([worker("a", 8)]) == {"a": 4}
    assert deletion_costs([worker("a", 2, draining=True), worker("a", 1)]) == {"a": 1}


def test_a_little_more_or_less_load_writes_nothing() -> None:
    assert len({deletion_costs([worker("a", number)])["a"] for number in range(33, 60)}) == 1


def test_only_what_differs_of_pods_that_there_are_is_written() -> None:
    pods: list[dict[str, Any]] = [
        {"metadata": {"name": "same", "annotations": {ANNOTATION: "3"}}},
        {"metadata": {"name": "other", "annotations": {ANNOTATION: "3", "x": "y"}}},
        {"metadata": {"name": "new"}},
        {"metadata": {"name": "no worker", "annotations": {ANNOTATION: "7"}}},
    ]
    assert changes(pods, {"same": 3, "other": 2, "new": 0, "gone": 1}) == {"other": 2, "new": 0}


def test_a_round_writes_the_costs_that_changed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "token").write_text("first")
    with serving(Server()) as server:
        server.annotations = {"a": {ANNOTATION: "1"}, "b": {ANNOTATION: "1"}}
        api = KubernetesApi(f"http://127.0.0.1:{server.server_port}", tmp_path)
        update(api, "app=x", [worker("a", 1), worker("b", 9), worker("c", 0), worker("gone", 2)])
        written = {path.rpartition("/")[2]: body["metadata"]["annotations"] for path, _, body in server.patched}
    assert written == {"b": {ANNOTATION: "4"}, "c": {ANNOTATION: "0"}}
