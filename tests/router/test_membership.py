"""Who may serve: only workers that are ready, linked, of the right model, and who they claim to be."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from diptych.v1 import bootstrap_pb2, worker_pb2

Cluster = Any
READY, GONE = bootstrap_pb2.INSTANCE_STATE_READY, bootstrap_pb2.INSTANCE_STATE_GONE


def ready(cluster: Cluster) -> tuple[int, str]:
    status, body = cluster.get("/ready")
    return status, json.loads(body)["reason"]


def served(cluster: Cluster, count: int = 8) -> Counter[int]:
    """Send requests; return how many each worker got."""
    before = Counter({worker.instance.instance_id: len(worker.started) for worker in cluster.workers})
    for _ in range(count):
        cluster.complete("p")
    after = Counter({worker.instance.instance_id: len(worker.started) for worker in cluster.workers})
    return after - before


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_equal_workers_share_the_load(start_cluster: Any, policy: str) -> None:
    assert served(start_cluster(2, 2, policy=policy)) == {100: 4, 101: 4, 102: 4, 103: 4}


def test_a_draining_worker_gets_nothing_new_but_finishes_what_it_has(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(1, 2)
    busy, other = cluster.decode(0), cluster.decode(1)
    busy.faults = [hang(3)]
    with cluster.ask(stream=True) as answer:
        cluster.wait_for(lambda: busy.started)
        busy.instance.state = bootstrap_pb2.INSTANCE_STATE_DRAINING
        cluster.publish(*cluster.workers)
        assert served(cluster, 4)[busy.instance.instance_id] == 0
        cluster.release(busy)
        assert b"[DONE]" in answer.read()
    assert (busy.aborted, len(other.started)) == ([], 4)


def test_the_legs_of_an_evicted_worker_move_to_another(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(1, 2)
    cluster.decode(0).faults = [hang(3)]
    connection = cluster.connect()
    cluster.wait_for(lambda: cluster.decode(0).started)
    cluster.publish(cluster.prefill(), cluster.decode(1))
    assert json.load(connection.getresponse())["choices"][0]["text"] == "Hello!"
    connection.close()
    assert len(cluster.decode(1).started) == 1


def test_a_stopped_worker_is_noticed_and_its_successor_used(start_cluster: Any) -> None:
    cluster = start_cluster(pair_wait_s=200.0)
    cluster.stop_worker(cluster.decode())
    cluster.wait_until(lambda: ready(cluster)[0] == 503)
    assert ready(cluster)[1] == "no decode worker for tiny is usable: 1 ready but not connected to this router"
    successor = cluster.add_worker(200, cluster.decode().instance.role)
    cluster.publish(cluster.prefill(), successor)
    assert cluster.complete("p")["text"] == "Hello!"
    assert len(successor.started) == 1


def test_a_worker_that_comes_back_as_it_was_is_used_again(cluster: Cluster) -> None:
    worker = cluster.decode()
    cluster.stop_worker(worker)
    cluster.wait_until(lambda: ready(cluster)[0] == 503)
    cluster.restart_worker(worker)
    cluster.wait_until(lambda: ready(cluster)[0] == 200)
    assert cluster.complete("p")["text"] == "Hello!"


def test_an_impostor_at_the_address_gets_no_legs(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    worker = cluster.decode()
    cluster.stop_worker(worker)
    cluster.wait_until(lambda: ready(cluster)[0] == 503)  # else a request may be lost with it, and waits for long
    caplog.set_level("INFO")
    worker.answers_as = 999
    cluster.restart_worker(worker)
    cluster.wait_until(lambda: f"instance {999:016x} answers at {worker.instance.address}" in caplog.text)
    status, answer = cluster.post("/v1/completions", {"prompt": "p"})
    assert (status, answer["error"]["code"], worker.started) == (503, "unavailable", [])


def test_without_a_pair_the_answer_is_503_with_retry_after_and_the_reason(cluster: Cluster) -> None:
    cluster.publish(cluster.prefill())
    assert ready(cluster) == (503, "no decode worker for tiny is usable: none is registered")
    with cluster.ask() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        error = json.load(answer)["error"]
    assert error["message"].startswith("no decode worker for tiny is usable: none is registered; waited ")
    assert error["type"] == "server_error"


def test_a_request_waits_a_moment_for_a_pair(start_cluster: Any) -> None:
    cluster = start_cluster(pair_wait_s=200.0)
    cluster.publish(cluster.prefill())
    connection = cluster.connect()
    cluster.wait_until(lambda: "diptych_router_requests_running 1.0" in cluster.get("/metrics")[1])
    cluster.publish(*cluster.workers)
    assert json.load(connection.getresponse())["choices"][0]["text"] == "Hello!"
    connection.close()


def test_unlinked_workers_are_no_pair(cluster: Cluster) -> None:
    cluster.publish(*cluster.workers, linked=False)
    assert ready(cluster) == (503, "prefill and decode workers are ready, but their transfer links are not up yet")


def test_links_reported_over_the_session_count(cluster: Cluster) -> None:
    cluster.publish(*cluster.workers, linked=False)
    assert ready(cluster)[0] == 503
    for worker, peer in (cluster.workers, reversed(cluster.workers)):
        load = bootstrap_pb2.WorkerLoad(linked_instances=[peer.instance.instance_id], free_pages=100)
        cluster.report_load(worker, load)
    cluster.wait_until(lambda: ready(cluster)[0] == 200)


def test_the_smallest_context_of_the_ready_workers_counts(cluster: Cluster) -> None:
    cluster.decode().instance.context_len = 50
    cluster.publish(*cluster.workers)
    status, answer = cluster.post("/v1/completions", {"prompt": "x" * 50})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    cluster.complete("x" * 49)
    assert cluster.decode().started[0].sampling.max_tokens == 1
    assert json.loads(cluster.get("/v1/models")[1])["data"][0]["context_len"] == 50


def test_a_worker_that_encodes_images_bounds_no_request(cluster: Cluster) -> None:
    encoder = cluster.add_worker(200, bootstrap_pb2.ROLE_ENCODE)
    encoder.instance.context_len = 50
    before = json.loads(cluster.get("/v1/models")[1])["data"][0]["context_len"]
    cluster.publish(*cluster.workers)
    cluster.wait_for(lambda: encoder.routers)
    assert cluster.complete("x" * 60)["text"] == "Hello!"
    assert json.loads(cluster.get("/v1/models")[1])["data"][0]["context_len"] == before > 60


def test_a_broken_session_leaves_no_task_behind(cluster: Cluster) -> None:
    """A task for each attempt to reach a dead worker would pile up, and keep the process from its end."""

    def readers() -> int:
        return sum(name.endswith("_consume_request_iterator") for name in cluster.names_of_tasks())

    cluster.complete()
    assert readers() == 2  # one a worker
    cluster.stop_worker(cluster.decode())
    cluster.wait_until(lambda: readers() == 1)


def test_a_session_that_was_refused_is_never_open(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    worker = cluster.decode()
    cluster.stop_worker(worker)
    cluster.wait_until(lambda: ready(cluster)[0] == 503)
    caplog.set_level("INFO")
    worker.refuses_sessions = True
    cluster.restart_worker(worker)
    cluster.wait_until(lambda: "RESOURCE_EXHAUSTED: no more sessions" in caplog.text)
    assert "connected to" not in caplog.text


@pytest.mark.parametrize("nonsense", [{"state": 17}, {"role": 17}])
def test_a_record_that_makes_no_sense_is_ignored(cluster: Cluster, nonsense: dict[str, Any]) -> None:
    worker = cluster.decode()
    record = bootstrap_pb2.Instance.FromString(worker.instance.SerializeToString())
    for name, value in nonsense.items():
        setattr(record, name, value)
    load = bootstrap_pb2.WorkerLoad(num_waiting=7, linked_instances=worker.instance.load.linked_instances)
    cluster.call(send(worker, worker_pb2.WorkerBatch(instance=record, load=load)))
    session = cluster.router.fleet.session(worker.instance.instance_id)
    cluster.wait_until(lambda: session.load().num_requests == 7)
    cluster.publish(*cluster.workers)
    assert cluster.complete("p")["text"] == "Hello!"


def test_an_older_load_of_bootstrap_does_not_undo_what_a_worker_said_itself(cluster: Cluster) -> None:
    worker = cluster.decode()
    session = cluster.router.fleet.session(worker.instance.instance_id)
    load = bootstrap_pb2.WorkerLoad(num_waiting=7, linked_instances=worker.instance.load.linked_instances)
    cluster.call(send(worker, worker_pb2.WorkerBatch(instance=worker.instance, load=load)))
    cluster.wait_until(lambda: session.load().num_requests == 7)
    cluster.publish(*cluster.workers, linked=False)
    assert session.load().num_requests == 7
    assert session.view().linked == set(load.linked_instances)


async def send(worker: Any, batch: worker_pb2.WorkerBatch) -> None:
    worker.send(batch)


def test_routers_that_are_members_are_known_and_get_no_work(start_cluster: Any) -> None:
    cluster = start_cluster(1, 1)
    own, other, gone = (
        bootstrap_pb2.Instance(instance_id=number, role=bootstrap_pb2.ROLE_ROUTER, state=state)
        for number, state in ((7, READY), (8, bootstrap_pb2.INSTANCE_STATE_DRAINING), (9, GONE))
    )
    cluster._members |= {each.instance_id: each for each in (own, other, gone)}
    assert cluster.router.fleet.routers().keys() == {7, 8}
    assert served(cluster, 2) == {100: 2, 101: 2}


def test_new_requests_avoid_a_worker_whose_scheduler_is_silent_until_it_is_heard_again(start_cluster: Any) -> None:
    cluster = start_cluster(1, 2)
    silent, other = cluster.decode(0), cluster.decode(1)
    session = cluster.router.fleet.session(silent.instance.instance_id)

    def report(silent_s: int) -> None:
        load = bootstrap_pb2.WorkerLoad()
        load.CopyFrom(silent.instance.load)
        load.silent_s = silent_s
        cluster.report_load(silent, load)
        cluster.wait_until(lambda: session.view().is_silent == (silent_s > 0))

    report(3)
    for _ in range(8):
        assert cluster.complete("p")["text"] == "Hello!"
    assert (len(silent.started), len(other.started)) == (0, 8)
    report(0)
    cluster.wait_until(lambda: cluster.complete("p") and silent.started)


def test_where_every_worker_is_silent_they_serve_what_comes(cluster: Cluster) -> None:
    worker = cluster.decode()
    load = bootstrap_pb2.WorkerLoad(silent_s=70, linked_instances=worker.instance.load.linked_instances)
    cluster.report_load(worker, load)
    session = cluster.router.fleet.session(worker.instance.instance_id)
    cluster.wait_until(lambda: session.view().is_silent)
    assert ready(cluster)[0] == 200
    assert cluster.complete("p")["text"] == "Hello!"
