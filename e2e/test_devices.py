"""What the chart asks a cluster for: a slice of a GPU, a runtime class, ports of nodes, ids of the cluster's choice.

The slice is one that nodes only count: the worker that gets it finds no GPU, and computes on CPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final

import node_devices
import pytest
from cluster import Cluster
from release import DEPLOYMENTS, DEVICES, NAME, WAIT, Release

IMAGE: Final = os.environ.get("DIPTYCH_E2E_CPU_IMAGE", "")
_, ROUTERS, _, DECODE = DEPLOYMENTS
SLICE: Final = "nvidia.com/mig-1g.10gb"
HANDLER: Final = "runc"  # that containerd has
UID: Final = 1000690000
PORT: Final = "30080"
EVENTS: Final = ("get", "events", "--watch", "--field-selector", "reason=FailedScheduling")
ASK: Final = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=20)
headers = {"authorization": "Bearer " + sys.argv[3], "content-type": "application/json"}
connection.request("POST", "/v1/completions", '{"model": "", "prompt": "a", "max_tokens": 4}', headers)
print(connection.getresponse().status)
"""
WHO: Final = "import json, os; print(json.dumps([os.getuid(), os.getgid()]))"
WRITE: Final = "open('/opt/diptych/new', 'w')"

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not IMAGE, reason="DIPTYCH_E2E_CPU_IMAGE is not set")]


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    kind = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "e2e"}, "handler": HANDLER}
    cluster.apply(kind)
    yield Release(cluster, IMAGE, *DEVICES)
    node_devices.withdraw(cluster, SLICE)
    cluster.kubectl("delete", "runtimeclass/e2e")


def test_a_worker_waits_for_a_slice_and_serves_once_a_node_has_one(release: Release, cluster: Cluster) -> None:
    release.submit("install")
    assert DECODE in cluster.see(f"Insufficient {SLICE}", *EVENTS)
    node_devices.offer(cluster, SLICE, 1)
    release.settle()
    (pod,) = release.pods(DECODE)
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][SLICE] == "1"
    assert pod["spec"]["runtimeClassName"] == "e2e"


def test_clients_reach_routers_at_a_port_of_each_node(cluster: Cluster) -> None:
    key = cluster.secret(f"{NAME}-diptych-api-keys", "key")
    for node in cluster.get("nodes"):
        address = address_of(node)
        assert (
            cluster.kubectl("exec", f"deployment/{ROUTERS}", "--", "python", "-c", ASK, address, PORT, key) == "200\n"
        )


def address_of(node: dict[str, Any]) -> str:
    return next(str(each["address"]) for each in node["status"]["addresses"] if each["type"] == "InternalIP")


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_every_component_runs_as_whoever_the_cluster_says_and_may_not_write(cluster: Cluster, deployment: str) -> None:
    found = json.loads(cluster.kubectl("exec", f"deployment/{deployment}", "--", "python", "-c", WHO))
    assert found == [UID, 0], "a user that the image does not know, of the group that the runtime gives such"
    with pytest.raises(AssertionError, match="Read-only file system"):
        cluster.kubectl("exec", f"deployment/{deployment}", "--", "python", "-c", WRITE)


def test_a_rollout_of_a_worker_with_the_only_slice_needs_no_second_one(release: Release, cluster: Cluster) -> None:
    (before,) = release.pods(DECODE)
    release.submit("upgrade", *WAIT, "--set=decode.pools[0].podLabels.e2e=anew")
    release.settle()
    (after,) = release.pods(DECODE)
    assert before["metadata"]["name"] != after["metadata"]["name"]
    assert after["metadata"]["labels"]["e2e"] == "anew"


def test_uninstalling(release: Release) -> None:
    release.uninstall()
    assert release.all_pods() == []
