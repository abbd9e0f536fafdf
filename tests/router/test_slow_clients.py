"""A client that takes its answer slowly, or not at all, costs a bounded buffer and its own answer, and nobody else."""

from __future__ import annotations

import gc
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any

NUM_TOKENS = 1500
FEWER_TOKENS = 1000  # that no buffer takes, either
STALL_S = 0.5
PATIENCE_S = 5.0  # with clients that read: longer than a busy machine may keep them from it
BUFFER_BYTES = 2**16
EVENT_BYTES = 2**10
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))


@pytest.fixture
def cluster(start_cluster: Any) -> Cluster:
    cluster = start_cluster(client_stall_s=STALL_S)
    cluster.script = "x" * 2000
    return cluster


@contextmanager
def asked(cluster: Cluster, **fields: Any) -> Iterator[socket.socket]:
    """A connection with a small window on which a request was sent and nothing has been read."""
    body = json.dumps({"prompt": "p", "max_tokens": NUM_TOKENS, "stream": True, **fields}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(200)
        connection.connect(("127.0.0.1", cluster.router.http.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        yield connection


def running(cluster: Cluster) -> int:
    return int(cluster.router.serving.shared.admission.num_running)


def read_all(connection: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        piece = connection.recv(65536)
        assert piece, "the connection was cut"
        answer += piece
    return answer


def text_of(answer: bytes) -> str:
    """What the events say; they may be cut by the chunks of HTTP."""
    events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_client_that_never_reads_is_cut_off_and_others_are_served_meanwhile(cluster: Cluster) -> None:
    with asked(cluster, logprobs=5):  # far more bytes than all buffers hold
        cluster.wait_until(lambda: running(cluster) == 1)
        assert cluster.complete(max_tokens=3)["text"] == "xxx"
        cluster.wait_until(lambda: running(cluster) == 0)
    counted = 'requests_total{api="completions",outcome="disconnected"} 1.0'
    cluster.wait_until(lambda: counted in cluster.get("/metrics")[1])


@pytest.fixture
def patient(start_cluster: Any) -> Cluster:
    cluster = start_cluster(client_stall_s=PATIENCE_S)
    cluster.script = "x" * 2000
    return cluster


def test_a_slow_client_that_goes_on_reading_gets_all(start_cluster: Any) -> None:
    cluster = start_cluster()
    cluster.script = "x" * 2000
    with asked(cluster, logprobs=5) as connection:
        begun = connection.recv(100)
        wait_until_all_tokens_have_come(cluster, 1)  # what waits is one event
        answer = begun + read_all(connection)
    assert text_of(answer) == "x" * NUM_TOKENS


def test_a_grpc_client_that_never_reads_is_cut_off_too(cluster: Cluster) -> None:
    request = inference_pb2.GenerateRequest(text="p")
    request.sampling.max_tokens, request.sampling.logprobs = NUM_TOKENS, 20
    with grpc.insecure_channel(cluster.grpc_target, SMALL_WINDOW) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request)
        cluster.wait_until(lambda: running(cluster) == 1)
        assert cluster.complete(max_tokens=3)["text"] == "xxx"
        cluster.wait_until(lambda: running(cluster) == 0)
        counted = 'requests_total{api="grpc",outcome="deadline"} 1.0'
        cluster.wait_until(lambda: counted in cluster.get("/metrics")[1])
        call.cancel()


def test_a_client_that_takes_a_little_at_a_time_gets_all(patient: Cluster) -> None:
    with asked(patient, logprobs=5) as connection:
        answer, begun_s = b"", time.monotonic()
        while time.monotonic() < begun_s + 1.2 * PATIENCE_S:
            answer += connection.recv(4096)
            time.sleep(PATIENCE_S / 20)
        answer += read_all(connection)
    assert b"data: [DONE]" in answer


def wait_until_all_tokens_have_come(cluster: Cluster, num_requests: int) -> None:
    """Nothing more is on its way from the workers: what their clients have not taken waits in the router."""
    cluster.wait_until(lambda: running(cluster) == num_requests)
    cluster.wait_for(lambda: all(worker.started and not worker.running for worker in cluster.workers))
    cluster.wait_until(lambda: 'legs_open{role="decode"} 0.0' in cluster.get("/metrics")[1])


def bytes_waiting(cluster: Cluster) -> list[int]:
    """How much each connection holds that its kernel has not taken."""

    async def count() -> list[int]:
        connections = cluster.router.http._server.server_state.connections
        return [connection.transport.get_write_buffer_size() for connection in connections]

    return list(cluster.call(count()))


def num_objects() -> int:
    """How many there are, of those that hold others: pieces and events of answers are some."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_a_client_that_never_reads_costs_does_not_grow_with_its_answer(
    start_cluster: Any, num_choices: int
) -> None:
    num_clients = 2
    cluster = start_cluster()
    cluster.script = "x" * 2000
    cluster.complete(n=num_choices)
    before = num_objects()
    with ExitStack() as stack:
        for _ in range(num_clients):
            stack.enter_context(asked(cluster, n=num_choices, max_tokens=FEWER_TOKENS))
        wait_until_all_tokens_have_come(cluster, num_clients * num_choices)
        assert running(cluster) == num_clients * num_choices
        assert max(bytes_waiting(cluster)) < BUFFER_BYTES + EVENT_BYTES
        assert num_objects() - before < num_clients * num_choices * FEWER_TOKENS / 2


def test_a_client_that_does_not_read_a_whole_answer_keeps_its_place_no_longer_and_is_cut_off(cluster: Cluster) -> None:
    with asked(cluster, stream=False, logprobs=5):
        cluster.wait_until(lambda: any(bytes_waiting(cluster)))
        assert running(cluster) == 0
        cluster.wait_until(lambda: not any(bytes_waiting(cluster)))


def test_a_client_that_takes_single_bytes_gets_all_and_makes_nothing_pile_up(start_cluster: Any) -> None:
    cluster = start_cluster()
    cluster.script = "x" * 2000
    with asked(cluster) as connection:
        begun = b""
        for _ in range(20):
            begun += connection.recv(1)
            time.sleep(0.01)
        wait_until_all_tokens_have_come(cluster, 1)
        assert max(bytes_waiting(cluster)) < BUFFER_BYTES + EVENT_BYTES
        answer = begun + read_all(connection)
    assert text_of(answer) == "x" * NUM_TOKENS


def calls_of_a_stream(cluster: Cluster) -> int:
    """What a stream of 200 tokens costs router and workers, in functions called: the same on busy cores."""
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    async def count_with(profile: Any) -> None:
        sys.setprofile(profile)

    cluster.call(count_with(count))
    with cluster.ask(stream=True, max_tokens=200) as answer:
        answer.read()
    cluster.call(count_with(None))
    return num_calls


def test_clients_that_do_not_read_cost_others_nothing(start_cluster: Any) -> None:
    cluster = start_cluster()
    cluster.script = "x" * 2000
    alone = calls_of_a_stream(cluster)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(asked(cluster, max_tokens=FEWER_TOKENS))
        wait_until_all_tokens_have_come(cluster, 3)
        beside = calls_of_a_stream(cluster)
        assert running(cluster) == 3
    assert beside < 2 * alone
