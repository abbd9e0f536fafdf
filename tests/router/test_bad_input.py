"""What is wrong is refused with a 4xx in OpenAI's shape that names the field; no worker hears of it."""

from __future__ import annotations

import http.client
from typing import Any

import pytest

Cluster = Any
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
    "an unknown field of a message": ({"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x"),
    "temperature below zero": ({"temperature": -1}, "temperature"),
    "temperature as text": ({"temperature": "1"}, "temperature"),
    "temperature as a truth value": ({"temperature": True}, "temperature"),
    "top_p of zero": ({"top_p": 0}, "top_p"),
    "top_p above one": ({"top_p": 1.5}, "top_p"),
    "negative top_k": ({"top_k": -1}, "top_k"),
    "max_tokens of zero": ({"max_tokens": 0}, "max_tokens"),
    "fractional max_tokens": ({"max_tokens": 1.5}, "max_tokens"),
    "contradicting limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    "priority above the highest": ({"priority": 101}, "priority"),
    "a tenant's name as long as a book": ({"user": "x" * 257}, "tenant"),
    "n of zero": ({"n": 0}, "n"),
    "n of nine": ({"n": 9}, "n"),
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
    "min_tokens below zero": ({"min_tokens": -1}, "min_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    "a broken stop_regex": ({"stop_regex": "("}, "stop_regex"),
    "a stop_regex that takes anything": ({"stop_regex": ["a", "b*"]}, "stop_regex"),
    "five of them": ({"stop_regex": ["a", "b", "c", "d", "e"]}, "stop_regex"),
    "a long cache_salt": ({"cache_salt": "x" * 257}, "cache_salt"),
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
    "best_of below n": ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    "best_of of nine": ({"prompt": "a", "best_of": 9}, "best_of"),
    "best_of in a stream": ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    "messages": ({"prompt": "a", "messages": []}, "messages"),
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
    status, answer = cluster.post("/v1/embeddings", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    status, answer = cluster.post("/v1/models", {})
    assert (status, answer["error"]["message"]) == (405, "POST /v1/models: Method Not Allowed")


def test_nothing_of_this_reached_a_worker(cluster: Cluster) -> None:
    before = len(cluster.prefill().started)
    cluster.post("/v1/chat/completions", {**CHAT, "n": 1000})
    cluster.complete("p")
    assert len(cluster.prefill().started) == before + 1
