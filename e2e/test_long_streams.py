"""Answers that take longer than a minute, while the routers that pass them on are taken away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from release import DEPLOYMENTS, LONG_STREAMS, SELECTOR, Release
from traffic import LONG, Traffic, assert_harmless

_, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
MINUTE_S = 60.0

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


def test_draining_a_node_of_routers_ends_no_stream_of_more_than_a_minute(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    before = {pod["metadata"]["name"] for pod in release.pods(ROUTERS)}
    with watched() as window:
        for node in sorted({pod["spec"]["nodeName"] for pod in release.pods(ROUTERS)}):
            cluster.drain(node, f"{SELECTOR},app.kubernetes.io/component=router")
            release.settle(ROUTERS)
    assert before.isdisjoint(pod["metadata"]["name"] for pod in release.pods(ROUTERS))
    assert window.slowest_s > MINUTE_S
    assert_harmless(window)


def test_uninstalling(release: Release, traffic: Traffic) -> None:
    traffic.stop()
    release.uninstall()
