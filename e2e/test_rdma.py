"""What docs/operations/rdma.md says, as far as it shows without RDMA.

Nodes offer devices that are not there: Kubernetes counts them as it counts real ones, and KV has TCP to go over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import node_devices
import pytest
from cluster import Cluster
from conftest import IMAGE
from release import DEPLOYMENTS, NAME, RDMA, Release

_, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
DEVICE: Final = "e2e.diptych.io/rdma"
DIPTYCH: Final = ("exec", f"deployment/{ROUTERS}", "--", "diptych")
EVENTS: Final = ("get", "events", "--watch", "--field-selector")
WITHOUT: Final = "--set=prefill.pools[0].rdma.require=false"
SURGE: Final = (
    "--set=prefill.pools[0].strategy.rollingUpdate.maxSurge=1,prefill.pools[0].strategy.rollingUpdate.maxUnavailable=0"
)
ANEW: Final = "--set=prefill.pools[0].podLabels.e2e=anew"
IPC_LOCK: Final = 1 << 14

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    yield Release(cluster, IMAGE, *RDMA)
    node_devices.withdraw(cluster, DEVICE)


def capabilities(cluster: Cluster, kind: str) -> int:
    """Return those of the worker's process."""
    found = cluster.kubectl(
        "exec", f"deployment/{PREFILL}", "--", "python", "-c", "print(open('/proc/1/status').read())"
    )
    return int(found.partition(f"{kind}:")[2].split()[0], 16)


def test_a_worker_is_pending_where_no_node_has_a_device_and_says_why(release: Release, cluster: Cluster) -> None:
    release.submit("install")
    assert PREFILL in cluster.see(f"Insufficient {DEVICE}", *EVENTS, "reason=FailedScheduling")


def test_a_worker_with_a_device_is_not_ready_over_slower_lanes_and_says_why(release: Release, cluster: Cluster) -> None:
    node_devices.offer(cluster, DEVICE, 1)
    release.wait_for_control()
    assert "not ready" in cluster.see("and --kv-require asks for rdma", *DIPTYCH, "status", "--watch=1")
    assert "tcp" in cluster.see("and --kv-require asks for rdma", *DIPTYCH, "links")
    [pod] = release.pods(PREFILL)
    assert not any(each["ready"] for each in pod["status"]["containerStatuses"])


def test_a_capability_is_offered_and_only_root_has_it(cluster: Cluster) -> None:
    assert capabilities(cluster, "CapBnd") == IPC_LOCK
    assert capabilities(cluster, "CapEff") == 0


def test_without_require_kv_goes_over_what_there_is_and_links_say_so(release: Release, cluster: Cluster) -> None:
    release.upgrade(WITHOUT)
    assert "tcp" in cluster.kubectl(*DIPTYCH, "links")
    assert "tcp" in release.test("kv")
    assert "without rdma.require a worker whose RDMA device fails serves over TCP" in cluster.helm("get", "notes", NAME)


def test_the_fabric_is_measured_between_two_pods_beside_their_workers(release: Release, cluster: Cluster) -> None:
    [prefill], [decode] = release.pods(PREFILL), release.pods(DECODE)
    kv = ("--", "diptych", "bench", "kv", "--pool-mib=16")
    with cluster.begin("exec", prefill["metadata"]["name"], *kv, "--serve", "--host=0.0.0.0") as server:
        assert server.stdout is not None
        assert any(line.startswith("ready:") for line in server.stdout)
        peer = f"--peer={prefill['status']['podIP']}:7070"
        said = cluster.kubectl("exec", decode["metadata"]["name"], *kv, peer, "--piece-kib=64", "--rounds=1")
        server.terminate()
    assert "tcp" in said
    assert "GB/s" in said


def test_a_rollout_that_wants_a_spare_device_hangs_until_strategy_is_empty(release: Release, cluster: Cluster) -> None:
    release.submit("upgrade", WITHOUT, ANEW, SURGE)
    waiting = cluster.see("Pending", "get", "pods", "--watch", "-l", "diptych.io/role=prefill").split()[0]
    assert f"Insufficient {DEVICE}" in cluster.kubectl("describe", "pod", waiting)
    release.upgrade(WITHOUT, ANEW)
    assert len(release.pods(PREFILL)) == 1
