"""One release, installed by the first test and uninstalled by the last; traffic runs from its first answer on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import pytest
from cluster import Cluster
from release import Release
from traffic import Traffic, Window

IMAGE: Final = os.environ.get("DIPTYCH_E2E_IMAGE", "diptych:0.1.0-sim")
NAMESPACE: Final = os.environ.get("DIPTYCH_E2E_NAMESPACE", "diptych-e2e")
WINDOWS: Final = pytest.StashKey[dict[str, Window]]()

Watch = Callable[[], AbstractContextManager[Window]]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A namespace of its own, deleted at the end with all that is in it."""
    cluster = Cluster(NAMESPACE)
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE)


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE)


@pytest.fixture(scope="session")
def traffic(cluster: Cluster) -> Traffic:
    traffic = Traffic(cluster)
    traffic.start(IMAGE)
    return traffic


@pytest.fixture
def watched(traffic: Traffic, request: pytest.FixtureRequest) -> Watch:
    """Makes a window of the traffic, which the summary tells about."""

    @contextmanager
    def watch() -> Iterator[Window]:
        with traffic.watched() as window:
            yield window
        request.config.stash.setdefault(WINDOWS, {})[request.node.name] = window

    return watch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("traffic")
    for name, window in config.stash.get(WINDOWS, {}).items():
        terminalreporter.line(f"{name:60} {window}")
        for problem in window.problems:
            terminalreporter.line(f"    {problem}")
