"""A worker on which requests keep failing gets none for a while, and a single one to try when that is over."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.router.choose import breakers
from diptych.v1 import worker_pb2

Cluster = Any


def open_breakers(cluster: Cluster) -> float:
    (line,) = [line for line in cluster.get("/metrics")[1].splitlines() if line.startswith("diptych_router_breakers_o")]
    return float(line.split()[1])


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is tried again within a test."""
    monkeypatch.setattr(breakers, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(breakers, "MAX_PAUSE_S", 3600.0)


@pytest.mark.usefixtures("long_pauses")
def test_a_worker_that_damages_everything_is_left_alone(start_cluster: Any, fail: Any) -> None:
    cluster = start_cluster(2, 2, breaker_failures=3)
    bad = cluster.decode(0)
    bad.faults = [fail(0, worker_pb2.ERROR_CODE_TRANSFER_FAILED) for _ in range(100)]
    for _ in range(30):
        assert cluster.complete("p")["text"] == "Hello!"
    assert len(bad.started) == 3
    assert open_breakers(cluster) == 1


def test_a_worker_that_is_sound_again_serves(start_cluster: Any, fail: Any) -> None:
    cluster = start_cluster(2, 2, breaker_failures=3)
    bad = cluster.decode(0)
    bad.faults = [fail(0, worker_pb2.ERROR_CODE_TRANSFER_FAILED) for _ in range(3)]
    cluster.wait_until(lambda: cluster.complete("p") and not bad.faults)
    cluster.wait_until(lambda: open_breakers(cluster) == 0)
    num_started = len(bad.started)
    cluster.wait_until(lambda: cluster.complete("p") and len(bad.started) >= num_started + 3)


@pytest.mark.usefixtures("long_pauses")
def test_the_last_worker_is_never_left_alone(cluster: Cluster, fail: Any) -> None:
    cluster.decode().faults = [fail(0, worker_pb2.ERROR_CODE_INTERNAL) for _ in range(8)]
    assert [cluster.post("/v1/completions", {"prompt": "p"})[0] for _ in range(8)] == [500] * 8
    assert open_breakers(cluster) == 1
    assert cluster.complete("p")["text"] == "Hello!"


@pytest.mark.usefixtures("long_pauses")
def test_a_request_that_fails_elsewhere_goes_to_a_worker_that_is_left_alone(start_cluster: Any, fail: Any) -> None:
    cluster = start_cluster(1, 2, breaker_failures=5)
    sound, bad = cluster.decode(0), cluster.decode(1)
    sound.faults = [fail(0, worker_pb2.ERROR_CODE_TRANSFER_FAILED) for _ in range(5)]
    while open_breakers(cluster) == 0:
        cluster.complete("p")
    bad.faults = [fail(0, worker_pb2.ERROR_CODE_TRANSFER_FAILED) for _ in range(4)]  # no more than one request may
    assert cluster.complete("p")["text"] == "Hello!"
