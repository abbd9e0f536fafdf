"""Requests of each API leave nothing that only a search for garbage frees, however they end."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any

OURS = ("diptych", "uvicorn", "starlette")
NUM_REQUESTS = 5

CHAT = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 4}
PROMPT = {"prompt": "p", "max_tokens": 4}
ENDS: Mapping[str, tuple[str, Any, int]] = {  # path, body, status
    "a chat": ("/v1/chat/completions", CHAT, 200),
    "a streamed chat of two choices": ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}, 200),
    "a completion": ("/v1/completions", {**PROMPT, "logprobs": 2}, 200),
    "a streamed completion": ("/v1/completions", {**PROMPT, "stream": True}, 200),
    "a response": ("/v1/responses", {"input": "p", "max_output_tokens": 4}, 200),
    "a streamed response": ("/v1/responses", {"input": "p", "max_output_tokens": 4, "stream": True}, 200),
    "a message": ("/v1/messages", {**CHAT, "model": "tiny"}, 200),
    "a streamed message": ("/v1/messages", {**CHAT, "model": "tiny", "stream": True}, 200),
    "a generation": ("/generate", {"text": "p", "sampling_params": {"max_new_tokens": 4}}, 200),
    "a body that is no JSON": ("/v1/chat/completions", "{", 400),
    "a wrong field": ("/v1/chat/completions", {**CHAT, "max_tokens": -1}, 400),
    "a prompt that is too long": ("/v1/completions", {"prompt": [1] * 5000, "max_tokens": 4}, 400),
    "a model that is not there": ("/v1/completions", {**PROMPT, "model": "another"}, 404),
}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


@contextmanager
def leaving_nothing(cluster: Cluster) -> Iterator[None]:
    """Look at what the requests of the block leave, once all of them have ended here and at the workers."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)  # what is found meanwhile is kept, too
    try:
        yield
        cluster.wait_until(lambda: not cluster.router.serving.shared.admission.num_open)
        cluster.wait_for(lambda: not any(worker.running for worker in cluster.workers))
        cluster.call(asyncio.sleep(0))
        gc.collect()
        found = of_ours(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not found


def of_ours(garbage: Sequence[object]) -> Counter[str]:
    """Return what objects are of, by the modules of their classes or of the functions that ran."""
    named = [
        f"{each.f_code.co_filename}:{each.f_lineno}" if isinstance(each, FrameType) else type(each).__module__
        for each in garbage
    ]
    return Counter(name for name in named if any(word in name for word in OURS))


@pytest.mark.parametrize("end", ENDS)
def test_a_request_leaves_nothing_to_the_search_for_garbage(cluster: Cluster, end: str) -> None:
    path, body, status = ENDS[end]
    ask(cluster, path, body)
    with leaving_nothing(cluster):
        assert {ask(cluster, path, body) for _ in range(NUM_REQUESTS)} == {status}


def test_a_client_that_leaves_its_stream_leaves_nothing(cluster: Cluster) -> None:
    def leave() -> None:
        with asked(cluster, "/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 2000}) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")

    cluster.script = "x" * 2000
    leave()
    with leaving_nothing(cluster):
        for _ in range(NUM_REQUESTS):
            leave()


def test_a_grpc_call_leaves_nothing_whether_it_is_served_or_refused(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call(stub.Generate, 1.0)
        with leaving_nothing(cluster):
            codes = [call(stub.Generate, top_p) for top_p in (1.0, 2.0) for _ in range(NUM_REQUESTS)]
            assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


def call(method: Callable[[Any], Any], top_p: float) -> grpc.StatusCode:
    request = inference_pb2.GenerateRequest(text="p")
    request.sampling.max_tokens, request.sampling.top_p = 4, top_p
    try:
        method(request)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def asked(cluster: Cluster, path: str, body: Any) -> socket.socket:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    connection = socket.create_connection(("127.0.0.1", cluster.router.http.port))
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def ask(cluster: Cluster, path: str, body: Any) -> int:
    """Return the status, once all of the answer is here."""
    with asked(cluster, path, body) as connection, connection.makefile("rb") as answer:
        return int(answer.read().split(b" ", 2)[1])
