"""Answers that take longer than 90 s, while routers that pass them on, and pools that make them, are taken away."""

from __future__ import annotations

from collections.abc import Iterator

import canary
import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from release import DEPLOYMENTS, LONG_STREAMS, NAME, SELECTOR, WAIT, Release
from traffic import LONG, Traffic, assert_harmless

_, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
LONG_S = 90.0

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *LONG_STREAMS)


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    traffic = Traffic(cluster, "traffic", LONG)
    traffic.start(IMAGE)
    yield traffic
    traffic.stop()


def test_installing(release: Release) -> None:
    release.install()


def test_draining_a_node_of_routers_ends_no_stream_of_more_than_90_s(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    before = {pod["metadata"]["name"] for pod in release.pods(ROUTERS)}
    with watched() as window:
        for node in sorted({pod["spec"]["nodeName"] for pod in release.pods(ROUTERS)}):
            cluster.drain(node, f"{SELECTOR},app.kubernetes.io/component=router")
            release.settle(ROUTERS)
    assert before.isdisjoint(pod["metadata"]["name"] for pod in release.pods(ROUTERS))
    assert window.slowest_s > LONG_S
    assert_harmless(window)


def test_a_canary_is_promoted_and_withdrawn_under_streams_of_more_than_90_s(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    """Half of the requests, then all, then none: the new pool is taken away while it makes answers."""
    with watched() as window:
        release.submit("upgrade", *WAIT, canary.VALUES)
        canary.wait_until(lambda: canary.served_by(cluster, "next") > 0, "the new pool has served nobody")
        release.submit("upgrade", *WAIT, canary.VALUES, canary.PROMOTED)
        canary.wait_until(lambda: canary.running_in(cluster, "default") == 0, "the old pool is never idle")
        assert canary.running_in(cluster, "next") > 0
        cluster.helm("rollback", NAME, "1", *WAIT)
        release.settle()
    assert not [pod for pod in release.all_pods() if "-next-" in pod["metadata"]["name"]]
    assert window.slowest_s > LONG_S
    assert_harmless(window)


def test_uninstalling(release: Release, traffic: Traffic) -> None:
    traffic.stop()
    release.uninstall()
