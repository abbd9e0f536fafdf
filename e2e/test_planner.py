"""The planner beside a platform whose load comes and goes: decode grows, and shrinks by draining, and nobody notices.

The workers are simulated, their time is not: a step takes 20 ms, and 3 ms more for each request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from release import NAME, PLANNED, Release
from traffic import Kind, Traffic, assert_harmless, harmless_load

PLANNER: Final = f"deployment/{NAME}-diptych-planner"
PREFILL: Final = f"{NAME}-diptych-prefill"
DECODE: Final = f"{NAME}-diptych-decode"
CALM: Final = Kind(num_clients=2, prompt=(8, 40), output=(30, 60))
OUTPUTS: Final = Kind(num_clients=20, prompt=(8, 40), output=(60, 120))


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """It ends at once: how a release ends well is tested elsewhere."""
    yield Release(cluster, IMAGE, *PLANNED)
    cluster.kubectl("delete", "deployments,pods", "--all", "--cascade=orphan", "--grace-period=0", "--force")


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    traffic = Traffic(cluster, "traffic", CALM)
    traffic.start(IMAGE)
    yield traffic
    traffic.stop()


def wait_for_workers(cluster: Cluster, deployment: str, count: int) -> None:
    cluster.wait(f"deployment/{deployment}", f"jsonpath={{.status.readyReplicas}}={count}")


def addresses(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["status"]["podIP"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def test_installing_leads_to_one_worker_of_each_role_and_a_planner(release: Release) -> None:
    release.install()
    assert [len(release.pods(pool)) for pool in (PREFILL, DECODE)] == [1, 1]


def test_decode_grows_with_the_load_and_shrinks_by_draining_the_worker_that_goes(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    with watched() as window:
        with harmless_load(cluster, OUTPUTS, IMAGE):
            wait_for_workers(cluster, DECODE, 2)
            before = addresses(release.pods(DECODE))
        drained = cluster.see(" drains", "logs", "--follow", PLANNER)
        cluster.wait(f"deployment/{DECODE}", "jsonpath={.spec.replicas}=1")
        wait_for_workers(cluster, DECODE, 1)
        (gone,) = before - addresses(release.pods(DECODE))
    assert f"at {gone}:" in drained
    assert len(release.pods(PREFILL)) == 1
    assert_harmless(window)
