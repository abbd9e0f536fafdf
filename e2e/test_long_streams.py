"""Answers that take longer than 90 s, while what passes them on, and what makes them, is taken away."""

from __future__ import annotations

from collections.abc import Iterator

import canary
import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from release import DEPLOYMENTS, LONG_STREAMS, NAME, SELECTOR, WAIT, Release
from traffic import LONG, Kind, Traffic, assert_harmless_to_long_streams, harmless_load

BOOTSTRAP, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
NAMED = Kind(num_clients=3, prompt=(8, 40), output=(4, 10), pool="next")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


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


def test_pools_that_grow_and_shrink_end_no_stream(release: Release, watched: Watch) -> None:
    with watched() as window:
        for deployment in (PREFILL, DECODE):
            release.scale(deployment, 3, 1, 2)
    assert_harmless_to_long_streams(window)


def test_restarts_and_deleted_pods_end_no_stream(release: Release, watched: Watch) -> None:
    with watched() as window:
        release.restart(BOOTSTRAP)
        release.restart(ROUTERS)
        for deployment in DEPLOYMENTS:
            release.delete_pod(deployment)
    assert_harmless_to_long_streams(window)


def test_draining_every_pod_from_a_node_ends_no_stream(release: Release, cluster: Cluster, watched: Watch) -> None:
    before = {pod["metadata"]["name"] for pod in release.all_pods()}
    with watched() as window:
        for node in sorted({pod["spec"]["nodeName"] for pod in release.all_pods()}):
            cluster.drain(node, f"{SELECTOR},e2e=long-streams")
            release.settle()
    assert before.isdisjoint(pod["metadata"]["name"] for pod in release.all_pods())
    assert_harmless_to_long_streams(window)


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
    assert_harmless_to_long_streams(window)


def test_blue_green_the_new_pool_is_tried_by_name_then_takes_all_and_the_old_one_goes(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    """Who names the new pool is served by it, and nobody else, before it gets all: then the old one is not missed."""
    with watched() as window:
        release.submit("upgrade", *WAIT, canary.VALUES, canary.TRIED, canary.EMPTY)
        canary.wait_until_declared(cluster, "next")
        before = canary.served_by(cluster, "next")  # of a pool of this name that there was
        release.submit("upgrade", *WAIT, canary.VALUES, canary.TRIED)
        named = before + canary.wait_until_served_by_name(cluster, "next")
        assert canary.served_by(cluster, "next") == named, "only who named it"
        with harmless_load(cluster, NAMED, IMAGE):
            canary.wait_until(lambda: canary.served_by(cluster, "next") > named + 6, "who names it is not served")
        canary.wait_until(lambda: canary.running_in(cluster, "next") == 0, "streams that name no pool are in it")
        release.submit("upgrade", *WAIT, canary.VALUES, canary.PROMOTED)
        canary.wait_until(lambda: canary.running_in(cluster, "default") == 0, "the old pool is never idle")
        release.submit("upgrade", *WAIT, canary.ALONE)
        release.settle(*DEPLOYMENTS[:2], f"{PREFILL}-next", f"{DECODE}-next")
    assert {pod["metadata"]["name"].rsplit("-", 2)[0] for pod in release.all_pods()} >= {f"{PREFILL}-next"}
    assert release.pods(PREFILL) == release.pods(DECODE) == []
    assert_harmless_to_long_streams(window)


def test_uninstalling(release: Release, traffic: Traffic) -> None:
    traffic.stop()
    release.uninstall()
