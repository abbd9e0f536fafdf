"""Pools that grow by what they run out of, and shrink again, under traffic that takes no notice.

The workers are simulated, their time is not: a prompt token takes 3 ms, a step 40 ms.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from custom_metrics import CustomMetrics
from release import AUTOSCALED, NAME, Release
from traffic import Kind, Traffic, assert_harmless, harmless_load

PREFILL: Final = f"{NAME}-diptych-prefill"
DECODE: Final = f"{NAME}-diptych-decode"
COST: Final = r"{.metadata.annotations.controller\.kubernetes\.io/pod-deletion-cost}"
SERVED_BY: Final = os.environ.get("DIPTYCH_E2E_METRICS")
CALM: Final = Kind(num_clients=3, prompt=(8, 100), output=(50, 150))
PROMPTS: Final = Kind(num_clients=8, prompt=(400, 600), output=(1, 4))
OUTPUTS: Final = Kind(num_clients=40, prompt=(20, 60), output=(400, 600))

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """Needs a custom metrics API: the cluster's own, or one that serves the file DIPTYCH_E2E_METRICS."""
    if SERVED_BY is None:
        cluster.kubectl("get", "--raw", "/apis/custom.metrics.k8s.io/v1beta1")
        yield Release(cluster, IMAGE, *AUTOSCALED)
        return
    metrics = CustomMetrics(cluster, Path(SERVED_BY))
    metrics.start()
    yield Release(cluster, IMAGE, *AUTOSCALED)
    metrics.close()


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    traffic = Traffic(cluster, "traffic", CALM)
    traffic.start(IMAGE)
    yield traffic
    traffic.stop()


def wait_for_workers(cluster: Cluster, deployment: str, count: int) -> None:
    cluster.wait(f"deployment/{deployment}", f"jsonpath={{.status.readyReplicas}}={count}")


def num_wanted(cluster: Cluster, deployment: str) -> int:
    return next(
        int(found["spec"]["replicas"])
        for found in cluster.get("deployments")
        if found["metadata"]["name"] == deployment
    )


def test_installing_with_autoscalers_leads_to_one_worker_of_each_role(release: Release) -> None:
    release.install()
    assert [num_wanted(release.cluster, pool) for pool in (PREFILL, DECODE)] == [1, 1]


def test_a_backlog_of_prompts_scales_the_prefill_pool_alone(release: Release, cluster: Cluster, watched: Watch) -> None:
    with watched() as window:
        with harmless_load(cluster, PROMPTS, IMAGE):
            wait_for_workers(cluster, PREFILL, 2)
            assert num_wanted(cluster, DECODE) == 1
        wait_for_workers(cluster, PREFILL, 1)
        release.settle(PREFILL)
    assert_harmless(window)


def test_full_pages_scale_the_decode_pool_alone_and_a_drained_worker_goes_first(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    with watched() as window:
        with harmless_load(cluster, OUTPUTS, IMAGE):
            wait_for_workers(cluster, DECODE, 2)
            assert num_wanted(cluster, PREFILL) == 1
            drained = drain_one_worker(release, cluster)
        wait_for_workers(cluster, DECODE, 1)
        release.settle(DECODE)
    assert drained not in {pod["metadata"]["name"] for pod in release.pods(DECODE)}
    assert_harmless(window)


def drain_one_worker(release: Release, cluster: Cluster) -> str:
    """Return the name of the oldest decode worker, once it is empty and the cheapest."""
    pods: list[dict[str, Any]] = sorted(release.pods(DECODE), key=lambda pod: pod["metadata"]["creationTimestamp"])
    name: str = pods[0]["metadata"]["name"]
    [found] = [each for each in cluster.get("secrets") if each["metadata"]["name"] == f"{NAME}-diptych-token"]
    token = base64.b64decode(found["data"]["operator"]).decode()
    drain = ("diptych", "drain", name, "--auth-token-file=/dev/stdin")
    cluster.kubectl("exec", "--stdin", f"deployment/{NAME}-diptych-router", "--", *drain, stdin=token)
    cluster.wait(f"pod/{name}", f"jsonpath={COST}=-1")
    return name


def test_uninstalling_ends_the_autoscalers(release: Release, cluster: Cluster, traffic: Traffic) -> None:
    traffic.stop()
    release.uninstall()
    assert cluster.get("horizontalpodautoscalers,deployments") == []
