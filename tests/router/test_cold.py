"""While there are no workers, requests wait for those that are started, for so long and no longer, and are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

Cluster = Any
HEADER = "x-diptych-waited-for-workers-s"


def waiting(cluster: Cluster) -> bool:
    return "diptych_router_requests_waiting_for_workers 1.0" in cluster.get("/metrics")[1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_request_waits_until_workers_are_there_and_its_answer_says_how_long(
    start_cluster: Callable[..., Cluster], stream: bool
) -> None:
    cluster = start_cluster(cold_wait_s=200.0)
    with cluster.ask(stream=False) as answer:
        assert HEADER not in answer.headers
    cluster.publish()
    assert "tiny" in cluster.get("/v1/models")[1], "models stay listed"
    found: dict[str, str | None] = {}

    def ask() -> None:
        with cluster.ask(stream=stream) as answer:
            found["waited_s"] = answer.headers[HEADER]
            answer.read()

    thread = threading.Thread(target=ask)
    thread.start()
    cluster.wait_until(lambda: waiting(cluster))
    cluster.publish(*cluster.workers)
    thread.join()
    assert float(found["waited_s"] or "nan") >= 0.0
    assert not waiting(cluster)


def test_it_waits_no_longer_than_it_may(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(cold_wait_s=0.3, pair_wait_s=0.01)
    cluster.publish()
    begun_s = time.monotonic()
    status, answer = cluster.post("/v1/completions", {"prompt": "p"})
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert time.monotonic() - begun_s >= 0.3


def test_where_a_worker_is_ready_that_is_only_not_linked_nobody_waits_for_a_start(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(cold_wait_s=200.0, pair_wait_s=0.01)
    cluster.publish(*cluster.workers, linked=False)
    assert cluster.post("/v1/completions", {"prompt": "p"})[0] == 503
