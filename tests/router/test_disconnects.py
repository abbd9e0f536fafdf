"""A client that leaves takes both legs of its request with it, whatever stage the request is in."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any


def ask(cluster: Cluster, **fields: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "p", "max_tokens": 2000, **fields}))
    return connection


def legs_open(cluster: Cluster) -> bool:
    return any(worker.running for worker in cluster.workers)


def both_started(cluster: Cluster) -> bool:
    return all(worker.started for worker in cluster.workers)


def check_both_were_aborted(cluster: Cluster) -> None:
    cluster.wait_for(lambda: all(worker.aborted for worker in cluster.workers) and not legs_open(cluster))
    rooms = {room for worker in cluster.workers for room in worker.aborted}
    assert rooms == {cluster.prefill().started[0].room}
    outcome = 'diptych_router_requests_total{api="completions",outcome="disconnected"} 1.0'
    cluster.wait_until(lambda: outcome in cluster.get("/metrics")[1])


def test_in_the_middle_of_its_own_body(cluster: Cluster) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", cluster.router.http.port)) as connection:
        connection.sendall(head + b'{"prompt": "p')
    outcome = 'diptych_router_requests_total{api="completions",outcome="disconnected"} 1.0'
    cluster.wait_until(lambda: outcome in cluster.get("/metrics")[1])


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(cluster: Cluster, hang: Any, stream: bool) -> None:
    for worker in cluster.workers:
        worker.faults = [hang(0)]
    connection = ask(cluster, stream=stream)
    cluster.wait_for(lambda: both_started(cluster))
    connection.close()
    check_both_were_aborted(cluster)


def test_in_the_middle_of_a_stream(cluster: Cluster, hang: Any) -> None:
    cluster.prefill().faults, cluster.decode().faults = [hang(1)], [hang(2)]
    connection = ask(cluster, stream=True)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    check_both_were_aborted(cluster)


def test_in_the_middle_of_an_answer_that_is_not_streamed(cluster: Cluster, hang: Any) -> None:
    cluster.prefill().faults, cluster.decode().faults = [hang(1)], [hang(2)]
    connection = ask(cluster)
    cluster.wait_for(lambda: both_started(cluster))
    connection.close()
    check_both_were_aborted(cluster)


def test_all_choices_go_with_the_client(cluster: Cluster, hang: Any) -> None:
    for worker in cluster.workers:
        worker.faults = [hang(0) for _ in range(3)]
    connection = ask(cluster, n=3, stream=True)
    cluster.wait_for(lambda: all(len(worker.started) == 3 for worker in cluster.workers))
    connection.close()
    cluster.wait_for(lambda: all(len(worker.aborted) == 3 for worker in cluster.workers))


def test_a_request_whose_client_left_while_waiting_for_a_pair_never_starts(start_cluster: Any) -> None:
    cluster = start_cluster(pair_wait_s=200.0)
    cluster.publish(cluster.prefill())
    connection = ask(cluster)
    cluster.wait_until(lambda: "diptych_router_requests_running 1.0" in cluster.get("/metrics")[1])
    connection.close()
    cluster.wait_until(lambda: "diptych_router_requests_running 0.0" in cluster.get("/metrics")[1])
    cluster.publish(*cluster.workers)
    cluster.wait_until(lambda: cluster.get("/ready")[0] == 200)
    cluster.complete("p")
    assert [len(worker.started) for worker in cluster.workers] == [1, 1]


def test_a_cancelled_grpc_stream(cluster: Cluster, hang: Any) -> None:
    cluster.prefill().faults, cluster.decode().faults = [hang(1)], [hang(2)]
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(inference_pb2.GenerateRequest(text="p"))
        next(call)
        call.cancel()
        cluster.wait_for(lambda: all(worker.aborted for worker in cluster.workers))
    cluster.wait_until(lambda: 'api="grpc",outcome="disconnected"} 1.0' in cluster.get("/metrics")[1])


def test_a_cancelled_grpc_call(cluster: Cluster, hang: Any) -> None:
    cluster.decode().faults = [hang(1)]
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate.future(inference_pb2.GenerateRequest(text="p"))
        cluster.wait_for(lambda: both_started(cluster))
        call.cancel()
        cluster.wait_for(lambda: cluster.decode().aborted)


def test_an_answered_request_aborts_nothing(cluster: Cluster) -> None:
    cluster.complete("p")
    connection = ask(cluster, stream=True)
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()
    cluster.complete("q")
    assert [worker.aborted for worker in cluster.workers] == [[], []]


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["p", "q"]}])
def test_a_client_that_was_sent_all_choices_of_a_stream_has_not_left(cluster: Cluster, fields: Any) -> None:
    connection = ask(cluster, stream=True, **fields)
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()
    cluster.wait_until(lambda: "diptych_router_requests_running 0.0" in cluster.get("/metrics")[1])
    assert 'diptych_router_requests_total{api="completions",outcome="ok"} 1.0' in cluster.get("/metrics")[1]
