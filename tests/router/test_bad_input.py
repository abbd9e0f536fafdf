"""What is wrong is refused with a 4xx in OpenAI's shape that names the field; no worker hears of it."""

from __future__ import annotations

import gzip
import http.client
import socket
import sys
import threading
from typing import Any

import pytest

Cluster = Any
FUNCTION = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}

# what is wrong: (fields, param)
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages as text": ({"messages": "hi"}, "messages"),
    "a message as text": ({"messages": ["hi"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    "a tool message": ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "content as a number": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    "a text part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content",
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
    ),
    "an unknown field": ({"colour": "red"}, "colour"),
    "audio of an earlier turn": (
        {"messages": [{"role": "assistant", "content": "", "audio": {"id": "a"}}]},
        "messages[0].audio",
    ),
    "images beside the content": (
        {"messages": [{"role": "user", "content": "", "images": ["a"]}]},
        "messages[0].images",
    ),
    "temperature below zero": ({"temperature": -1}, "temperature"),
    "temperature as text": ({"temperature": "1"}, "temperature"),
    "temperature as a truth value": ({"temperature": True}, "temperature"),
    "top_p of zero": ({"top_p": 0}, "top_p"),
    "top_p above one": ({"top_p": 1.5}, "top_p"),
    "negative top_k": ({"top_k": -2}, "top_k"),
    "max_tokens of zero": ({"max_tokens": 0}, "max_tokens"),
    "fractional max_tokens": ({"max_tokens": 1.5}, "max_tokens"),
    "contradicting limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    "priority above the highest": ({"priority": 101}, "priority"),
    "a tenant's name as long as a book": ({"user": "x" * 257}, "tenant"),
    "n of zero": ({"n": 0}, "n"),
    "n of 129": ({"n": 129}, "n"),
    "n of a thousand": ({"n": 1000}, "n"),
    "seed as text": ({"seed": "lucky"}, "seed"),
    "a seed of 65 bits": ({"seed": 2**64}, "seed"),
    "an empty stop string": ({"stop": ""}, "stop"),
    "seventeen stop strings": ({"stop": ["a"] * 17}, "stop"),
    "stop as a number": ({"stop": 1}, "stop"),
    "stream as text": ({"stream": "yes"}, "stream"),
    "stream options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "too many top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "negative top_logprobs": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "logprobs as a number": ({"logprobs": 5}, "logprobs"),
    "prompt_logprobs below zero": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "prompt_logprobs in a stream": ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    "tools": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "a forced tool": ({"tool_choice": "required"}, "tool_choice"),
    "presence_penalty": ({"presence_penalty": 2.1}, "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": -2.1}, "frequency_penalty"),
    "repetition_penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "min_p": ({"min_p": 1.1}, "min_p"),
    "a strong logit_bias": ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    "logit_bias as a list": ({"logit_bias": [5]}, "logit_bias"),
    "logit_bias of a word": ({"logit_bias": {"word": 1}}, "logit_bias"),
    "logit_bias as text": ({"logit_bias": {"5": "1"}}, "logit_bias[5]"),
    "logit_bias beyond the vocabulary": ({"logit_bias": {"257": 1}}, "logit_bias"),
    "too much logit_bias": ({"logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
    "a stop token beyond the vocabulary": ({"stop_token_ids": [300]}, "stop_token_ids"),
    "no token allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "an allowed token beyond the vocabulary": ({"allowed_token_ids": [1, 257]}, "allowed_token_ids"),
    "allowed tokens and a grammar": ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
    "allowed tokens and min_tokens": ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids"),
    "allowed tokens and a forced call": (
        {"allowed_token_ids": [1], "tools": [FUNCTION], "tool_choice": "required"},
        "allowed_token_ids",
    ),
    "too many allowed tokens": ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids"),
    "min_tokens below zero": ({"min_tokens": -1}, "min_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    "a broken stop_regex": ({"stop_regex": "("}, "stop_regex"),
    "a stop_regex that takes anything": ({"stop_regex": ["a", "b*"]}, "stop_regex"),
    "a stop_regex of nested repeats": ({"stop_regex": "(?:" * 80 + "a" + "+)" * 80 + "Z"}, "stop_regex"),
    "five of them": ({"stop_regex": ["a", "b", "c", "d", "e"]}, "stop_regex"),
    "a long cache_salt": ({"cache_salt": "x" * 257}, "cache_salt"),
    "a draft model": ({"speculate": "draft:/models/small"}, "speculate"),
    "a prediction of tokens": ({"prediction": {"type": "tokens", "content": "a"}}, "prediction.type"),
    "a prediction of nothing": ({"prediction": {"type": "content"}}, "prediction.content"),
    "a prediction of images": (
        {"prediction": {"type": "content", "content": [{"type": "image"}]}},
        "prediction.content",
    ),
    "a prediction that is too long": ({"prediction": {"type": "content", "content": "x" * 40000}}, "prediction"),
    "best_of in a chat": ({"best_of": 2}, "best_of"),
    "echo in a chat": ({"echo": True}, "echo"),
    "nothing to continue": ({"continue_final_message": True}, "continue_final_message"),
    "an answer that neither begins nor goes on": ({"add_generation_prompt": False}, "add_generation_prompt"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities"),
    "too long": ({"messages": [{"role": "user", "content": "x" * 2048}]}, "messages"),
}

BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "prompt"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "an empty list": ({"prompt": []}, "prompt"),
    "a prompt without tokens": ({"prompt": [[]]}, "prompt"),
    "a number": ({"prompt": 5}, "prompt"),
    "a mixture": ({"prompt": ["a", 1]}, "prompt"),
    "truth values as tokens": ({"prompt": [True]}, "prompt"),
    "a token beyond the vocabulary": ({"prompt": [257]}, "prompt"),
    "a negative token": ({"prompt": [-1]}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt"),
    "echo as text": ({"prompt": "a", "echo": "yes"}, "echo"),
    "suffix": ({"prompt": "a", "suffix": "z"}, "suffix"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, "logprobs"),
    "logprobs as a truth value": ({"prompt": "a", "logprobs": True}, "logprobs"),
    "neither prompt nor output": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "best_of below n": ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    "best_of of 129": ({"prompt": "a", "best_of": 129}, "best_of"),
    "best_of in a stream": ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    "messages": ({"prompt": "a", "messages": []}, "messages"),
}

USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
TEXT_PART = {"type": "text", "text": ""}

# more of something than a body may have: (path, fields, the limit)
TOO_MANY: dict[str, tuple[str, dict[str, Any], int]] = {
    "messages": ("/v1/chat/completions", {"messages": [USER] * 4097}, 4096),
    "parts of a content": ("/v1/chat/completions", {"messages": [{**USER, "content": [TEXT_PART] * 1025}]}, 1024),
    "calls of a message": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 1025}]},
        1024,
    ),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [FUNCTION] * 129}, 128),
    "tools of a message": (
        "/v1/messages",
        {**CHAT, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}] * 129},
        128,
    ),
    "messages of a message": ("/v1/messages", {"max_tokens": 1, "messages": [USER] * 4097}, 4096),
    "blocks of a message": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{**USER, "content": [TEXT_PART] * 1025}]},
        1024,
    ),
    "stop sequences": ("/v1/messages", {**CHAT, "max_tokens": 1, "stop_sequences": ["a"] * 17}, 16),
    "items of a response": ("/v1/responses", {"input": [USER] * 4097}, 4096),
    "parts of an item": (
        "/v1/responses",
        {"input": [{**USER, "content": [{**TEXT_PART, "type": "input_text"}] * 1025}]},
        1024,
    ),
    "messages to tokenise": ("/tokenize", {"messages": [USER] * 4097}, 4096),
    "messages to count": ("/v1/messages/count_tokens", {"messages": [USER] * 4097}, 4096),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 129}, 128),
    "texts": ("/generate", {"text": ["a"] * 129}, 128),
    "stop strings": ("/generate", {"text": "a", "sampling_params": {"stop": ["a"] * 17}}, 16),
    "stop tokens": ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 129}, 128),
    "token ids": ("/v1/completions", {"prompt": [1] * (2**20 + 2)}, 2**20),
    "tokens": ("/detokenize", {"tokens": [1] * (2**20 + 2)}, 2**20),
    "objects": ("/v1/chat/completions", {**CHAT, "tools": [{}] * 65536}, 65536),
    "fields": ("/v1/chat/completions", {**CHAT, **{f"f{at}": 1 for at in range(65536)}}, 65536),
}

NEUTRAL = {
    "model": "tiny",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "user": "me",
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "stop": None,
    "n": 1,
}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


def check(cluster: Cluster, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = cluster.post(path, body)
    assert (status, set(answer)) == (400, {"error"}), answer
    error = answer["error"]
    assert (error["type"], error["param"], set(error)) == (
        "invalid_request_error",
        param,
        {"message", "type", "param", "code"},
    )
    assert error["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_a_bad_chat_is_refused(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    check(cluster, "/v1/chat/completions", {**CHAT, **fields}, param)


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS.keys())
def test_a_bad_completion_is_refused(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    check(cluster, "/v1/completions", fields, param)


@pytest.mark.parametrize(("path", "fields", "limit"), TOO_MANY.values(), ids=TOO_MANY.keys())
def test_too_many_of_anything_are_refused_with_how_many_there_may_be(
    cluster: Cluster, path: str, fields: dict[str, Any], limit: int
) -> None:
    status, answer = cluster.post(path, fields)
    assert status == 400
    assert str(limit) in answer["error"]["message"]


def calls_to(name: str, cluster: Cluster, fields: dict[str, Any]) -> int:
    """How often the router's functions of that name are called until it has answered with 400."""
    num_calls = 0

    def count(frame: Any, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_name == name

    threading.setprofile(count)  # of threads to come: long bodies have one
    try:
        cluster.call(profiled_with(count))
        assert cluster.post("/v1/chat/completions", fields)[0] == 400
        cluster.call(profiled_with(None))
    finally:
        threading.setprofile(None)
    return num_calls


async def profiled_with(profile: Any) -> None:
    sys.setprofile(profile)


def test_of_too_many_messages_no_more_than_the_limit_are_looked_at(start_cluster: Any) -> None:
    assert calls_to("_joined", start_cluster(), {"messages": [USER] * 60_000}) <= 4097


def test_of_what_is_wrong_with_a_body_no_more_is_listed_than_is_told(cluster: Cluster) -> None:
    messages = [{"role": "wizard", "content": "hi"}] * 4000
    status, answer = cluster.post("/v1/chat/completions", {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages[0].role")
    status, answer = cluster.post("/v1/chat/completions", {**CHAT, **{f"f{at}": 1 for at in range(1000)}})
    assert (status, answer["error"]["message"]) == (
        400,
        "1000 things are wrong with the body: look for fields that nobody knows",
    )


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"GET /health HTTP/1.1\r\na: " + b"x" * 2**20, 431, b"at most 32768 bytes and 100 fields"),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431, b"at most 32768 bytes and 100 fields"),
        (b"GET /" + b"x" * 8192 + b" HTTP/1.1\r\n\r\n", 414, b"at most 8192 bytes"),
    ],
    ids=["a long value", "many fields", "a long URL"],
)
def test_a_head_beyond_its_limits_is_refused_in_words_and_its_connection_closed(
    cluster: Cluster, head: bytes, status: int, words: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", cluster.router.http.port), timeout=200) as connection:
        connection.sendall(head)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert words in answer
    assert b"connection: close\r\n" in answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"\0" * 100,
        b'{"a":' * 50_000,
    ],
    ids=["empty", "cut off", "a list", "null", "a string", "not UTF-8", "a lone surrogate", "zeros", "deep"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_garbage_is_refused(cluster: Cluster, path: str, body: bytes) -> None:
    status, answer = cluster.post(path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_a_compressed_body_is_refused_unread(cluster: Cluster, path: str) -> None:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    body = gzip.compress(b'{"prompt": "p", "max_tokens": 1}')
    connection.request("POST", path, body, headers={"content-encoding": "gzip"})
    answer = connection.getresponse()
    assert (answer.status, b"content-encoding" in answer.read()) == (415, True)
    connection.request("POST", "/v1/completions", b'{"prompt": "p"}', headers={"content-encoding": "identity"})
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_unread(cluster: Cluster, chunked: bool) -> None:
    body = b"x" * (10 << 20)
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    data: Any = iter([body[:5_000_000], body[5_000_000:]]) if chunked else body
    connection.request(
        "POST",
        "/v1/completions",
        data,
        encode_chunked=chunked,
        headers={"transfer-encoding": "chunked"} if chunked else {},
    )
    answer = connection.getresponse()
    assert (answer.status, b"payload_too_large" in answer.read()) == (413, True)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_fields_with_their_neutral_value_are_accepted(cluster: Cluster) -> None:
    status, answer = cluster.post("/v1/chat/completions", {**CHAT, **NEUTRAL})
    assert status == 200, answer


def test_an_unknown_path_or_method_has_the_same_shape(cluster: Cluster) -> None:
    status, answer = cluster.post("/v1/unknown", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    status, answer = cluster.post("/v1/models", {})
    assert (status, answer["error"]["message"]) == (405, "POST /v1/models: Method Not Allowed")


def test_nothing_of_this_reached_a_worker(cluster: Cluster) -> None:
    before = len(cluster.prefill().started)
    cluster.post("/v1/chat/completions", {**CHAT, "n": 1000})
    cluster.complete("p")
    assert len(cluster.prefill().started) == before + 1
