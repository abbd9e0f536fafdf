"""A Kubernetes API with one pool of two decode workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_serving import serving
from kubernetes_server import Server

from diptych.common.members.kubernetes_api import KubernetesApi

LABELS = {"diptych.io/role": "decode", "diptych.io/pool": "default"}


def pod(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"of {name}", "labels": LABELS},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        namespace = "namespaces/llm"
        deployment = {
            "metadata": {"name": "d", "labels": LABELS, "resourceVersion": "77"},
            "spec": {"replicas": 2},
            "status": {"replicas": 2, "updatedReplicas": 2},
        }
        server.objects = {
            f"/api/v1/{namespace}/pods": [pod("a"), pod("b")],
            f"/apis/apps/v1/{namespace}/deployments": [deployment],
            f"/apis/autoscaling/v1/{namespace}/horizontalpodautoscalers": [],
        }
        yield server


@pytest.fixture
def api(server: Server, tmp_path: Path) -> KubernetesApi:
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "token").write_text("first")
    return KubernetesApi(f"http://127.0.0.1:{server.server_port}", tmp_path)
