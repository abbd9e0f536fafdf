"""What came of guesses is part of the usage that clients are told, and nothing is where nobody guessed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from simulated_worker import Fault

from diptych.v1 import inference_pb2_grpc, worker_pb2
from diptych.v1.inference_pb2 import GenerateRequest

Cluster = Any
SCRIPT = "Zoë says: 你好 🙂!"
NAMES = ("accepted_prediction_tokens", "rejected_prediction_tokens")
BODIES: Mapping[str, Any] = {
    "/v1/completions": {"prompt": "p", "max_tokens": 64},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/responses": {"input": "p"},
    "/generate": {"text": "p", "sampling_params": {"max_new_tokens": 64}},
}


def told(path: str, answer: Any) -> Mapping[str, int]:
    """Return what an answer says of guesses."""
    if path == "/generate":
        details = answer["meta_info"]
    elif path == "/v1/responses":
        details = answer["usage"]["output_tokens_details"]
    else:
        details = answer["usage"].get("completion_tokens_details", {})
    return {name: details[name] for name in NAMES if name in details}


def expected(cluster: Cluster) -> Mapping[str, int]:
    """Five drafts, of which one came true, in each row: all tokens of decode but its last."""
    num_rows = len(cluster.tokenizer.encode(SCRIPT)) - 1
    return {NAMES[0]: num_rows, NAMES[1]: 4 * num_rows}


@pytest.fixture
def drafting(cluster: Cluster) -> Cluster:
    cluster.script = SCRIPT
    for worker in cluster.workers:
        worker.drafts, worker.accepted_drafts = 5, 1
    return cluster


@pytest.mark.parametrize("path", BODIES)
def test_they_are_told(drafting: Cluster, path: str) -> None:
    status, answer = drafting.post(path, BODIES[path])
    assert status == 200, answer
    assert told(path, answer) == expected(drafting)


@pytest.mark.parametrize("path", BODIES)
def test_nothing_is_told_where_nobody_guessed(cluster: Cluster, path: str) -> None:
    cluster.script = SCRIPT
    status, answer = cluster.post(path, BODIES[path])
    assert status == 200
    assert told(path, answer) == {}


def test_a_stream_tells_them_in_its_end(drafting: Cluster) -> None:
    body = BODIES["/v1/chat/completions"] | {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(drafting.url + "/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    assert json.loads(events[-1])["usage"]["completion_tokens_details"] == expected(drafting)


def test_several_outputs_are_counted_together(drafting: Cluster) -> None:
    _, answer = drafting.post("/v1/completions", BODIES["/v1/completions"] | {"n": 2})
    assert told("/v1/completions", answer) == {name: 2 * count for name, count in expected(drafting).items()}


def test_what_a_failed_attempt_guessed_counts_too(drafting: Cluster) -> None:
    """The next attempt goes on behind the tokens that came: its first token is that of prefill, and no row."""
    drafting.decode().faults = [Fault("error", 3, worker_pb2.ERROR_CODE_RETRACTED)]
    status, answer = drafting.post("/v1/completions", BODIES["/v1/completions"])
    assert status == 200, answer
    assert told("/v1/completions", answer)[NAMES[0]] == expected(drafting)[NAMES[0]] - 1


def test_grpc(drafting: Cluster) -> None:
    with grpc.insecure_channel(drafting.grpc_target) as channel:
        usage = inference_pb2_grpc.InferenceStub(channel).Generate(GenerateRequest(text="p")).usage
    assert {name: getattr(usage, name) for name in NAMES} == expected(drafting)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_what_a_stop_string_cuts_off_is_not_counted(drafting: Cluster, path: str) -> None:
    """However many tokens behind it had come with it."""
    stop = {"stop": ":"} if path != "/generate" else {"sampling_params": {"max_new_tokens": 64, "stop": ":"}}
    num_rows = len(drafting.tokenizer.encode(SCRIPT[: SCRIPT.index(":") + 1])) - 1
    _, answer = drafting.post(path, BODIES[path] | stop)
    assert told(path, answer) == {NAMES[0]: num_rows, NAMES[1]: 4 * num_rows}
