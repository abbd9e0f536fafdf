"""Bad input gets a 4xx in the OpenAI error shape, or a gRPC status, and disturbs nobody."""

from __future__ import annotations

import contextlib
import http.client
import os
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc

Platform = Any
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

BAD_CHATS: dict[str, dict[str, Any]] = {
    "empty messages": {"messages": []},
    "no messages": {"messages": None},
    "messages of a wrong type": {"messages": "hi"},
    "a message without content": {"messages": [{"role": "user"}]},
    "an unknown role": {"messages": [{"role": "wizard", "content": "hi"}]},
    "too long a prompt": {"messages": [{"role": "user", "content": "word " * 9000}]},
    "negative temperature": {"temperature": -1},
    "temperature of a wrong type": {"temperature": "hot"},
    "top_p of zero": {"top_p": 0},
    "top_p above one": {"top_p": 1.5},
    "no tokens": {"max_tokens": 0},
    "negative max_tokens": {"max_tokens": -5},
    "fractional max_tokens": {"max_tokens": 1.5},
    "n of a thousand": {"n": 1000},
    "n of zero": {"n": 0},
    "an empty stop string": {"stop": [""]},
    "too many stop strings": {"stop": ["a"] * 100},
    "a seed of a wrong type": {"seed": "lucky"},
    "stream of a wrong type": {"stream": "perhaps"},
}


@pytest.mark.parametrize("fields", BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_a_bad_chat_request_is_a_400_that_says_why(platform: Platform, fields: dict[str, Any]) -> None:
    status, answer = platform.post("/v1/chat/completions", {"model": platform.model_id(), **CHAT, **fields})
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]


def test_an_unknown_model_is_a_404(platform: Platform) -> None:
    status, answer = platform.post("/v1/chat/completions", {**CHAT, "model": "gpt-none"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"model": "\xff\xfe"}', b"\x00" * 100, b'{"a":' * 50_000],
    ids=["empty", "cut off", "a list", "null", "a string", "not UTF-8", "zeros", "deep"],
)
def test_garbage_is_a_400(platform: Platform, body: bytes) -> None:
    status, answer = platform.post("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_ten_megabytes_of_garbage_are_refused_with_a_4xx(platform: Platform) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", platform.http_port, timeout=200)
    body = os.urandom(10_000_000)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may come before the body was sent
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert 400 <= answer.status < 500
    connection.close()


@pytest.mark.parametrize(
    "request_",
    [
        inference_pb2.GenerateRequest(),
        inference_pb2.GenerateRequest(text=""),
        inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[4_000_000])),
        inference_pb2.GenerateRequest(text="hi", sampling=inference_pb2.SamplingParams(temperature=-1)),
        inference_pb2.GenerateRequest(text="hi", sampling=inference_pb2.SamplingParams(max_tokens=0)),
        inference_pb2.GenerateRequest(text="word " * 9000),
        inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages()),
    ],
    ids=["nothing", "empty text", "token out of vocabulary", "temperature", "max_tokens", "too long", "no messages"],
)
def test_bad_grpc_input_is_invalid_argument(platform: Platform, request_: inference_pb2.GenerateRequest) -> None:
    with grpc.insecure_channel(platform.grpc_target) as channel, pytest.raises(grpc.RpcError) as error:
        inference_pb2_grpc.InferenceStub(channel).Generate(request_, timeout=200)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_nothing_was_disturbed(platform: Platform) -> None:
    assert platform.complete("The capital of France is", 2)["choices"][0]["text"].startswith(" Paris")
    platform.assert_clean()
