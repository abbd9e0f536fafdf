"""Each module has one release: its first test installs it, its last one uninstalls it, traffic runs between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import pytest
from cluster import Cluster
from release import SIM, Release
from traffic import USUAL, Traffic, Window

IMAGE: Final = os.environ.get("DIPTYCH_E2E_IMAGE", "diptych:0.1.0-sim")
NEXT_IMAGE: Final = os.environ.get("DIPTYCH_E2E_NEXT_IMAGE", IMAGE)
NAMESPACE: Final = os.environ.get("DIPTYCH_E2E_NAMESPACE", "diptych-e2e")

Watch = Callable[[], AbstractContextManager[Window]]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A namespace of its own, deleted at the end with all that is in it; nobody waits for that, which takes long."""
    cluster = Cluster(f"{NAMESPACE}-{request.module.__name__.removeprefix('test_').replace('_', '-')}")
    cluster.wait(f"namespace/{cluster.namespace}", "delete")  # of a run before; at once if there is none
    cluster.kubectl("create", "namespace", cluster.namespace)
    yield cluster
    cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=false")


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *SIM)


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    traffic = Traffic(cluster, "traffic", USUAL)
    traffic.start(IMAGE)
    yield traffic
    traffic.stop()


@pytest.fixture
def watched(traffic: Traffic, request: pytest.FixtureRequest) -> Watch:
    """Makes a window of the traffic, which is told about when the test is over."""

    @contextmanager
    def watch() -> Iterator[Window]:
        with traffic.watched() as window:
            request.node.user_properties.append(("traffic", window))
            yield window

    return watch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a test failed, add what the cluster is like."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections.append(("cluster", cluster.describe()))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell at once how long it took, what became of the requests, and what went wrong with them."""
    if report.when != "call":
        return
    print(f"    {report.duration:6.1f} s", *_words(report.user_properties), sep="\n      ", flush=True)


def _words(properties: list[tuple[str, Any]]) -> Iterator[str]:
    for name, window in properties:
        if name == "traffic":
            yield str(window)
            yield from window.problems
