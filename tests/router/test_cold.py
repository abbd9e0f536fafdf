"""While there are no workers, requests wait for those that are started, for so long and no longer, and are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
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


def in_thread(ask: Callable[[], tuple[int, Any]], answers: list[tuple[int, Any]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    return thread


def test_workers_of_a_pool_of_weight_0_do_not_end_the_wait_but_of_requests_that_name_it(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(prefill=2, decode=2, cold_wait_s=200.0, pair_wait_s=0.01)
    for index, worker in enumerate(cluster.workers):
        worker.instance.pool = ("old", "next")[index % 2]
    cluster.post("/admin/declared", b"[pools]\nold = 1\nnext = 0")
    cluster.publish(*cluster.workers[1::2])
    cluster.wait_until(lambda: len(cluster.router.fleet.pairs()) == 1)
    answers: list[tuple[int, Any]] = []
    thread = in_thread(lambda: cluster.post("/v1/completions", {"prompt": "p"}), answers)
    cluster.wait_until(lambda: waiting(cluster))
    assert cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-pool": "next"})[0] == 200
    cluster.publish(*cluster.workers)
    thread.join()
    assert (answers[0][0], len(cluster.workers[0].started)) == (200, 1)


def test_a_declared_adapter_wakes_workers_and_is_waited_for(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    path = tmp_path / "declared.toml"
    path.write_text('[adapters]\nsql = "/a/sql"')
    cluster = start_cluster(cold_wait_s=200.0, declared_file=path)
    cluster.wait_until(lambda: cluster.router.fleet.adapters() == ("sql",))
    cluster.publish()
    for worker in cluster.workers:
        del worker.instance.loras[:]  # as if it had started anew
    answers: list[tuple[int, Any]] = []
    thread = in_thread(lambda: cluster.post("/v1/completions", {"prompt": "p", "model": "sql"}), answers)
    cluster.wait_until(lambda: waiting(cluster) or answers)
    cluster.publish(*cluster.workers)
    thread.join()
    assert (answers[0][0], answers[0][1]["model"]) == (200, "sql")
    assert [leg.lora for worker in cluster.workers for leg in worker.started] == ["sql", "sql"]


def test_a_declared_adapter_that_is_not_there_is_never_served_by_the_base_model(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    path = tmp_path / "declared.toml"
    path.write_text('[adapters]\nsql = "/a/sql"')
    cluster = start_cluster(cold_wait_s=200.0, declared_file=path)
    cluster.wait_until(lambda: cluster.router.fleet.adapters() == ("sql",))
    cluster.publish()
    for worker in cluster.workers:
        del worker.instance.loras[:]
        worker.admin.failure = grpc.StatusCode.INTERNAL
    cluster.publish(*cluster.workers)
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "model": "sql"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert [len(worker.started) for worker in cluster.workers] == [0, 0]
