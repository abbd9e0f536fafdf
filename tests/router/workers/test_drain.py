"""What a router makes of workers that leave: streams go on elsewhere, exactly, and nobody counts a failure."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from simulated_worker import SimulatedWorker

from diptych.cli.reports.status_report import drain_words
from diptych.cli.requests.asking import Answer, ask, ask_to_drain
from diptych.common.trust.trust import INSECURE
from diptych.v1 import worker_pb2
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance
from diptych.v1.worker_pb2 import Drain

Cluster = Any
SCRIPT = "Zoë says: 你好 🙂! And then some more, until the end of the story."


def stream(cluster: Cluster, **fields: Any) -> tuple[str, str]:
    """Return the text of a stream and its finish reason; any error fails the test."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request(
        "POST", "/v1/completions", json.dumps({"prompt": "p", "max_tokens": 2000, "stream": True, **fields})
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body
    *events, done = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    assert done == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def value(cluster: Cluster, sample: str) -> float:
    """A sample of the router's metrics."""
    lines = cluster.get("/metrics")[1].splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{sample} ")), 0.0)


def on_loop(cluster: Cluster, *calls: Any) -> None:
    """Call these at once, between two turns of the workers."""

    async def all_of_them() -> None:
        for call in calls:
            call()

    cluster.call(all_of_them())


def num_running(*workers: SimulatedWorker) -> int:
    return sum(len(worker.running) for worker in workers)


def test_a_hundred_streams_survive_a_decode_worker_that_hands_them_back(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(2, 2)
    cluster.script = SCRIPT
    leaving, staying = cluster.decode(0), cluster.decode(1)
    for number in range(100):
        leaving.faults.append(hang(number % 50))
        staying.faults.append(hang(number % 50))
    with ThreadPoolExecutor(100) as pool:
        streams = [pool.submit(stream, cluster) for _ in range(100)]
        cluster.wait_for(lambda: num_running(leaving) >= 30)
        on_loop(cluster, leaving.drain, leaving.hand_back)
        cluster.release(staying)
        assert {each.result() for each in streams} == {(SCRIPT, "stop")}
    assert value(cluster, "diptych_router_handed_back_total") >= 30
    assert "diptych_router_retries_total{" not in cluster.get("/metrics")[1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_is_handed_back_before_its_first_token_starts_elsewhere_at_once(
    start_cluster: Any, hang: Any, role: str
) -> None:
    cluster = start_cluster(2, 2, lost_pair_wait_s=0.0)
    for worker in cluster.workers:
        worker.faults = [hang(0)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, cluster)
        cluster.wait_for(lambda: num_running(*cluster.workers) == 2)
        pick = cluster.prefill if role == "prefill" else cluster.decode
        leaving = next(worker for worker in (pick(0), pick(1)) if worker.running)
        for worker in cluster.workers:
            worker.faults = []
        on_loop(cluster, leaving.drain, leaving.hand_back)
        assert answer.result() == ("Hello!", "stop")
    assert value(cluster, "diptych_router_handed_back_total") == 1


def test_the_other_legs_abort_may_come_first(start_cluster: Any, hang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer heard before us that the worker leaves, and only says that the room was given up."""
    monkeypatch.setattr("diptych.router.serve.attempt.REASON_GRACE_S", 200.0)
    cluster = start_cluster(1, 2)
    cluster.script = SCRIPT
    for worker in cluster.workers:
        worker.faults = [hang(0)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, cluster)
        cluster.wait_for(lambda: num_running(*cluster.workers) == 2)
        leaving = next(worker for worker in (cluster.decode(0), cluster.decode(1)) if worker.running)
        [room] = leaving.running
        given_up = worker_pb2.LegError(code=worker_pb2.ERROR_CODE_ABORTED)
        news = worker_pb2.WorkerBatch(outputs=[worker_pb2.LegOutput(room=room, error=given_up)])
        for worker in cluster.workers:
            worker.faults = []
        on_loop(cluster, leaving.drain, lambda: cluster.prefill().send(news))
        assert answer.result() == (SCRIPT, "stop")
    assert value(cluster, "diptych_router_handed_back_total") == 1
    assert "diptych_router_retries_total{" not in cluster.get("/metrics")[1]


def test_no_new_pair_has_a_draining_worker_even_while_bootstrap_is_away(start_cluster: Any) -> None:
    cluster = start_cluster(2, 1)
    leaving = cluster.prefill(0)
    on_loop(cluster, leaving.drain)
    cluster.wait_until(lambda: len(cluster.router.fleet.pairs()) == 1)
    for _ in range(4):
        cluster.complete()
    assert leaving.started == []


@pytest.mark.parametrize("news", ["draining", "paused"])
def test_late_news_from_bootstrap_does_not_bring_a_worker_back(start_cluster: Any, news: str) -> None:
    cluster = start_cluster(2, 1)
    leaving = cluster.prefill(0)
    late = Instance.FromString(leaving.instance.SerializeToString())

    def announce() -> None:
        leaving.instance.paused = news == "paused"
        leaving.send(worker_pb2.WorkerBatch(instance=leaving.instance))

    on_loop(cluster, leaving.drain if news == "draining" else announce)
    cluster.wait_until(lambda: len(cluster.router.fleet.pairs()) == 1)
    on_loop(
        cluster, lambda: cluster.router.fleet.session(late.instance_id).update(late), cluster.router.fleet._note_change
    )
    assert len(cluster.router.fleet.pairs()) == 1


def test_the_running_legs_of_a_draining_worker_go_on(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(1, 1)
    cluster.script = SCRIPT
    cluster.decode().faults = [hang(3)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, cluster)
        cluster.wait_for(lambda: num_running(cluster.decode()) == 1)
        on_loop(cluster, cluster.decode().drain)
        cluster.wait_until(lambda: not cluster.router.fleet.pairs())
        cluster.release(cluster.decode())
        assert answer.result() == (SCRIPT, "stop")


def leave(cluster: Cluster, worker: SimulatedWorker) -> None:
    """Bootstrap says that a worker said goodbye."""
    cluster.ended.add(worker.instance.instance_id)
    cluster.publish(*(other for other in cluster.workers if other is not worker))


def test_a_goodbye_that_overtakes_the_last_outputs_costs_none(
    start_cluster: Any, hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.workers.fleet.LAST_WORDS_S", 200.0)
    cluster = start_cluster(1, 2, policy="round_robin")
    cluster.script = SCRIPT
    leaving, other = cluster.decode(0), cluster.decode(1)
    leaving.faults = [hang(3)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, cluster)
        cluster.wait_for(lambda: num_running(leaving) == 1)
        leave(cluster, leaving)
        assert {pair.decode_id for pair in cluster.router.fleet.pairs()} == {other.instance.instance_id}
        cluster.release(leaving)
        assert answer.result() == (SCRIPT, "stop")
    assert other.started == []
    cluster.wait_until(lambda: not leaving.has_sessions)


def test_a_worker_that_said_goodbye_is_not_waited_for_long(
    start_cluster: Any, hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.workers.fleet.LAST_WORDS_S", 0.05)
    cluster = start_cluster(1, 2, policy="round_robin")
    cluster.script = SCRIPT
    cluster.decode(0).faults = [hang(3)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, cluster)
        cluster.wait_for(lambda: num_running(cluster.decode(0)) == 1)
        leave(cluster, cluster.decode(0))
        assert answer.result() == (SCRIPT, "stop")
    assert len(cluster.decode(1).started) == 1


def test_without_another_pair_the_client_is_told_to_come_back(start_cluster: Any) -> None:
    cluster = start_cluster(1, 1, lost_pair_wait_s=0.05)
    with cluster.ask() as answer:
        assert answer.status == 200
        answer.read()
    on_loop(cluster, cluster.decode().drain)
    with cluster.ask() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "draining" in json.loads(answer.read())["error"]["message"]


def test_a_request_waits_for_the_worker_that_replaces_the_one_that_left(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(1, 1, lost_pair_wait_s=200.0)
    cluster.script = SCRIPT
    leaving = cluster.decode()
    leaving.faults = [hang(3)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, cluster)
        cluster.wait_for(lambda: num_running(leaving) == 1)
        on_loop(cluster, leaving.drain, leaving.hand_back)
        successor = cluster.add_worker(200, leaving.instance.role)
        cluster.publish(cluster.prefill(), successor)
        assert answer.result() == (SCRIPT, "stop")


def drain_router(cluster: Cluster, query: str = "") -> dict[str, Any]:
    status, answer = cluster.post(f"/admin/drain{query}", b"")
    assert status == 202
    return dict(answer)


def test_a_draining_router_is_not_ready_yet_serves_who_reaches_it_and_asks_them_to_go(
    start_cluster: Any, hang: Any
) -> None:
    cluster = start_cluster(drain_s=200.0)
    cluster.decode().faults = [hang(2)]
    with cluster.ask(stream=True) as answer:
        progress = drain_router(cluster)
        [instance] = progress["instances"].values()
        assert (progress["phase"], instance["requests_left"]) == ("draining", 1)
        assert cluster.get("/health/ready")[0] == 503
        assert json.loads(cluster.get("/ready")[1]) == {"ready": False, "reason": "draining"}
        with cluster.ask() as late:
            assert (late.status, late.headers["connection"]) == (200, "close")
            late.read()
        cluster.release(cluster.decode())
        assert answer.read().endswith(b"data: [DONE]\n\n")
    cluster.wait_until(lambda: json.loads(cluster.get("/admin/drain")[1])["phase"] == "empty")


def test_a_router_ends_what_does_not_finish_in_time(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster()
    cluster.decode().faults = [hang(2)]
    with cluster.ask(stream=True) as answer:
        drain_router(cluster, "?deadline_s=0")
        assert b"the router is stopping" in answer.read()
    cluster.wait_until(lambda: json.loads(cluster.get("/admin/drain")[1])["phase"] == "empty")


def test_what_comes_to_a_router_that_is_empty_already_has_the_whole_time_after_sigterm(
    start_cluster: Any, hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.main.STOP_GRACE_S", 0)
    cluster = start_cluster(drain_s=60.0)
    drain_router(cluster)
    cluster.wait_until(lambda: json.loads(cluster.get("/admin/drain")[1])["phase"] == "empty")
    cluster.decode().faults = [hang(2)]
    with cluster.ask(stream=True) as answer:
        cluster.stop_router()
        cluster.wait_until(lambda: not cluster.accepts_connections())
        cluster.release(cluster.decode())
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_request_whose_body_is_on_its_way_at_sigterm_is_served(start_cluster: Any) -> None:
    cluster = start_cluster(drain_s=60.0)
    body = json.dumps({"prompt": "p", "max_tokens": 2000}).encode()
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body[:5])
    cluster.get("/health")  # by now the router has read that
    cluster.stop_router()
    cluster.wait_until(lambda: not cluster.accepts_connections())
    connection.send(body[5:])
    assert json.load(connection.getresponse())["choices"][0]["text"] == "Hello!"
    connection.close()


def test_a_connection_is_asked_to_close_by_what_holds_when_its_answer_begins(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(drain_s=200.0)
    cluster.decode().faults = [hang(2)]
    connection = cluster.connect()
    cluster.wait_for(lambda: num_running(cluster.decode()) == 1)
    drain_router(cluster)
    cluster.release(cluster.decode())
    with connection.getresponse() as answer:
        assert (answer.status, answer.headers["connection"]) == (200, "close")
    connection.close()


def test_a_second_signal_ends_a_router_without_waiting(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(drain_s=60.0)
    cluster.decode().faults = [hang(2)]
    with cluster.ask(stream=True) as answer:
        cluster.stop_router()
        cluster.wait_until(lambda: not cluster.accepts_connections())
        on_loop(cluster, cluster._stop.hurry.set)
        assert b"the router is stopping" in answer.read()


def test_the_command_line_has_a_router_drain_and_hears_how_far_it_is(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster()
    cluster.decode().faults = [hang(2)]
    router = Instance(
        instance_id=cluster.router.fleet.router_id, role=ROLE_ROUTER, address=cluster.url.removeprefix("http://")
    )
    assert ask(router, INSECURE, 5.0) == Answer(router)
    with cluster.ask(stream=True) as answer:
        drain = ask_to_drain(router, 60.0, INSECURE, 5.0).drain
        assert drain is not None
        assert (drain.phase, drain.requests_left) == (Drain.PHASE_DRAINING, 1)
        assert 0 < drain.deadline_s <= 60.0
        cluster.release(cluster.decode())
        answer.read()
    cluster.wait_until(lambda: drain_words(ask(router, INSECURE, 5.0).drain) == "empty")
