"""The endpoint picker of gateways, without a gateway: it names routers that run, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import canary
import pytest
from cluster import Cluster
from conftest import IMAGE
from release import DEPLOYMENTS, NAME, PICKER, Release

SCRIPT: Final = Path(__file__).with_name("gateway_pod.py").read_text()
GROUP: Final = "inference.networking.k8s.io"
ROUTERS: Final = DEPLOYMENTS[1]

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *PICKER)


@pytest.fixture(scope="module", autouse=True)
def _kind(cluster: Cluster) -> Iterator[None]:
    """The kind of the pool, which the inference extension brings, without its schema."""
    names = {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    name = f"inferencepools.{GROUP}"
    approved = {"api-approved.kubernetes.io": "unapproved, for tests"}
    metadata = {"name": name, "annotations": approved}
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    cluster.apply({**crd, "metadata": metadata, "spec": spec})
    cluster.wait(f"customresourcedefinition/{name}", "condition=Established")
    yield
    cluster.kubectl("delete", f"customresourcedefinition/{name}", "--wait=false")


def picked(cluster: Cluster, session: str = "") -> list[str]:
    asked = ("python", "-c", SCRIPT, f"{NAME}-diptych-picker:9002", session)
    return list(json.loads(cluster.kubectl("exec", f"deployment/{ROUTERS}", "--", *asked)))


def endpoints(pods: list[dict[str, Any]]) -> set[str]:
    return {f"{pod['status']['podIP']}:8000" for pod in pods}


def test_a_gateway_is_told_of_the_routers_that_run(release: Release, cluster: Cluster) -> None:
    release.install()
    assert set(picked(cluster)) == endpoints(release.pods(ROUTERS))
    assert len({tuple(picked(cluster, "s")) for _ in range(4)}) == 1, "a session stays"
    (pool,) = cluster.get("inferencepools")
    labels = ",".join(f"{key}={value}" for key, value in pool["spec"]["selector"]["matchLabels"].items())
    assert endpoints(cluster.get("pods", "-l", labels)) == endpoints(release.pods(ROUTERS))


def test_one_that_is_deleted_is_no_longer_picked_and_its_successor_is(release: Release, cluster: Cluster) -> None:
    before = endpoints(release.pods(ROUTERS))
    release.delete_pod(ROUTERS)
    after = endpoints(release.pods(ROUTERS))
    assert before != after
    canary.wait_until(lambda: set(picked(cluster)) == after, "it still picks others")


def test_uninstalling(release: Release, cluster: Cluster) -> None:
    release.uninstall()
    assert cluster.get("inferencepools") == []
