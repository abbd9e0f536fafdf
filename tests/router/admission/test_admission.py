"""More requests than the router takes at once: who waits, who goes first, who is refused and how soon."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

Cluster = Any


@pytest.fixture
def busy(start_cluster: Any, hang: Any) -> Any:
    """`busy(**options)`: a cluster with one place, whose holder goes on when the decode worker is released."""

    def start(**options: Any) -> tuple[Cluster, http.client.HTTPConnection]:
        cluster = start_cluster(**{"max_concurrent": 1, "max_queue_wait_s": 200.0, **options})
        cluster.decode().faults = [hang(1)]
        connection = cluster.connect()
        cluster.wait_for(lambda: cluster.decode().started)
        return cluster, connection

    return start


def in_line(cluster: Cluster, count: int) -> None:
    cluster.wait_until(lambda: cluster.router.serving.shared.admission.num_waiting == count)


def texts(connections: Sequence[http.client.HTTPConnection]) -> list[str]:
    answers = []
    for connection in connections:
        answers.append(json.loads(connection.getresponse().read())["choices"][0]["text"])
        connection.close()
    return answers


def test_who_finds_no_place_waits_in_line(busy: Any) -> None:
    cluster, first = busy()
    others = [cluster.connect() for _ in range(3)]
    in_line(cluster, 3)
    assert "diptych_router_requests_waiting 3.0" in cluster.get("/metrics")[1]
    cluster.release(cluster.decode())
    assert texts([first, *others]) == ["Hello!"] * 4


def test_the_higher_priority_goes_first(busy: Any) -> None:
    cluster, first = busy()
    connections = [first]
    for index, (prompt, priority) in enumerate((("low", -5), ("normal", 0), ("high", 7))):
        connections.append(cluster.connect(prompt=prompt, priority=priority))
        in_line(cluster, index + 1)
    cluster.release(cluster.decode())
    texts(connections)
    started = [cluster.tokenizer.decode(leg.prompt_token_ids) for leg in cluster.decode().started]
    assert started == ["p", "high", "normal", "low"]


def test_overload_is_answered_at_once(busy: Any) -> None:
    cluster, first = busy(max_queued=0)
    for _ in range(5):  # while the first one goes on: whoever waited for it would wait for ever
        with cluster.ask() as answer:
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert json.load(answer)["error"]["code"] == "rate_limit_exceeded"
    assert 'diptych_router_turned_away_total{reason="full"} 5.0' in cluster.get("/metrics")[1]
    cluster.release(cluster.decode())
    texts([first])


def test_a_full_line_takes_a_higher_priority_and_refuses_its_last(busy: Any) -> None:
    cluster, first = busy(max_queued=1)
    low = cluster.connect(priority=-1)
    in_line(cluster, 1)
    high = cluster.connect()
    with low.getresponse() as answer:
        assert (answer.status, json.load(answer)["error"]["message"]) == (
            429,
            "the router is busy, and requests of higher priority have come; try again in 1 s",
        )
    low.close()
    cluster.release(cluster.decode())
    assert texts([first, high]) == ["Hello!"] * 2


def test_nobody_waits_in_line_for_longer_than_it_may(busy: Any) -> None:
    cluster, first = busy(max_queue_wait_s=0.05)
    status, answer = cluster.post("/v1/completions", {"prompt": "p"})
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert 'diptych_router_turned_away_total{reason="expired"} 1.0' in cluster.get("/metrics")[1]
    cluster.release(cluster.decode())
    texts([first])


def test_a_first_token_that_would_come_too_late_is_refused_before_a_worker_hears_of_it(cluster: Cluster) -> None:
    cluster.prefill().stats = worker_pb2.LegStats(compute_us=20_000_000)
    for slo_ms in ("", "60000"):  # the worker's speed is known then
        assert cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-ttft-deadline-ms": slo_ms})[0] == 200
    with cluster.ask(headers={"x-diptych-ttft-deadline-ms": "5000"}) as answer:
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert "later than the request allows" in json.load(answer)["error"]["message"]
    assert len(cluster.prefill().started) == 2
    assert 'diptych_router_turned_away_total{reason="ttft_deadline"} 1.0' in cluster.get("/metrics")[1]


def test_a_deadline_passes_in_line_too(busy: Any) -> None:
    cluster, first = busy()
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(inference_pb2.GenerateRequest(text="p"), timeout=0.1)
    assert caught.value.code() in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    in_line(cluster, 0)
    cluster.release(cluster.decode())
    texts([first])


def test_who_leaves_the_line_costs_nobody_anything(busy: Any) -> None:
    cluster, first = busy()
    leaving, staying = cluster.connect(n=1), cluster.connect()
    in_line(cluster, 2)
    leaving.close()
    in_line(cluster, 1)
    cluster.release(cluster.decode())
    assert texts([first, staying]) == ["Hello!"] * 2
    assert len(cluster.decode().started) == 2


def test_what_is_wrong_is_said_before_anybody_waits(busy: Any) -> None:
    cluster, first = busy(max_queued=0)
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "n": 129})
    assert (status, answer["error"]["param"]) == (400, "n")
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "n": 2})
    assert (status, "at most 1" in answer["error"]["message"]) == (400, True)
    cluster.release(cluster.decode())
    texts([first])


TOKEN_PATHS: list[tuple[str, Any]] = [
    ("/tokenize", {"prompt": "p"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
]


def test_questions_about_tokens_need_a_place_too(busy: Any) -> None:
    cluster, first = busy(max_queued=0)
    assert [cluster.post(path, body)[0] for path, body in TOKEN_PATHS] == [429] * 3
    with grpc.insecure_channel(cluster.grpc_target) as channel, pytest.raises(grpc.RpcError) as caught:
        inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest(text="p"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    cluster.release(cluster.decode())
    texts([first])
    assert [cluster.post(path, body)[0] for path, body in TOKEN_PATHS] == [200] * 3


def test_who_asks_about_tokens_may_leave_the_line(busy: Any) -> None:
    cluster, first = busy()
    leaving = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    leaving.request("POST", "/tokenize", json.dumps({"prompt": "p"}))
    in_line(cluster, 1)
    leaving.close()
    in_line(cluster, 0)
    cluster.wait_until(lambda: '{api="tokens",outcome="disconnected"} 1.0' in cluster.get("/metrics")[1])
    cluster.release(cluster.decode())
    texts([first])


def test_a_stopping_router_answers_those_in_line(busy: Any, hang: Any) -> None:
    cluster, first = busy(drain_s=0.1)
    waiting = cluster.connect()
    in_line(cluster, 1)
    cluster.stop_router()
    for connection in (first, waiting):
        with connection.getresponse() as answer:
            assert (answer.status, json.load(answer)["error"]["message"]) == (503, "the router is stopping")
        connection.close()
