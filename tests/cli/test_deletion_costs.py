"""Deletion costs as they reach the API."""

from __future__ import annotations

from pathlib import Path

from http_serving import serving
from kubernetes_server import Server

from diptych.cli.deletion_costs import ANNOTATION, update
from diptych.common.members.kubernetes_api import KubernetesApi
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_DECODE, Instance, WorkerLoad


def worker(pod: str, running: int) -> Instance:
    return Instance(role=ROLE_DECODE, state=INSTANCE_STATE_READY, pod=pod, load=WorkerLoad(num_running=running))


def test_a_round_writes_the_costs_that_changed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "token").write_text("first")
    with serving(Server()) as server:
        server.annotations = {"a": {ANNOTATION: "1"}, "b": {ANNOTATION: "1"}}
        api = KubernetesApi(f"http://127.0.0.1:{server.server_port}", tmp_path)
        update(api, "app=x", [worker("a", 1), worker("b", 9), worker("c", 0), worker("gone", 2)])
        written = {path.rpartition("/")[2]: body["metadata"]["annotations"] for path, _, body in server.patched}
    assert written == {"b": {ANNOTATION: "4"}, "c": {ANNOTATION: "0"}}
