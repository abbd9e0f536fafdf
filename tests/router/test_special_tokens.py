"""Special tokens are shown to whoever wants to see them: in chats, completions and /generate."""

from __future__ import annotations

import http.client
import json
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "p"},
    "/generate": {"text": "p", "incremental_streaming_output": True},
}
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    cluster = start_shared_cluster(special_tokens=["<|turn|>", "<|end|>"])
    cluster.script = "a<|turn|><|end|>é"
    return cluster


def ask(cluster: Cluster, path: str, **fields: Any) -> str:
    """Return the text of an answer, which is the same in one piece and as a stream."""
    body = {**PATHS[path], **({"sampling_params": fields} if path == "/generate" else fields)}
    status, answer = cluster.post(path, body)
    assert status == 200, answer
    whole = _text(answer)
    assert "".join(map(_text, _events(cluster, path, body))) == whole
    return whole


def _events(cluster: Cluster, path: str, body: Any) -> list[Any]:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", path, json.dumps({**body, "stream": True}))
    *events, _ = connection.getresponse().read().decode().strip().split("\n\n")
    connection.close()
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _text(part: Any) -> str:
    if "text" in part:
        return str(part["text"])
    (choice,) = part["choices"]
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("text") or said.get("content") or ""


@EVERY_PATH
@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": True, "spaces_between_special_tokens": False}])
def test_they_have_no_text_by_default(cluster: Cluster, path: str, fields: Any) -> None:
    assert ask(cluster, path, **fields) == "aé"


@EVERY_PATH
@pytest.mark.parametrize("spaces", [None, True, False])
def test_they_are_shown_on_demand_with_nothing_between_them(cluster: Cluster, path: str, spaces: bool | None) -> None:
    fields = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    assert ask(cluster, path, **fields) == "a<|turn|><|end|>é"


@pytest.mark.parametrize(("is_shown", "text"), [(False, "aé"), (True, "a<|turn|><|end|>é")])
def test_grpc_shows_them_on_demand(cluster: Cluster, is_shown: bool, text: str) -> None:
    request = inference_pb2.GenerateRequest(text="p", show_special_tokens=is_shown)
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert stub.Generate(request).text == text
        assert "".join(chunk.text for chunk in stub.GenerateStream(request)) == text


@EVERY_PATH
def test_one_that_ends_the_output_is_not_shown(cluster: Cluster, path: str) -> None:
    (turn,) = cluster.tokenizer.encode("<|turn|>")
    assert ask(cluster, path, skip_special_tokens=False, stop_token_ids=[turn]).startswith("a<|end|>")


@EVERY_PATH
def test_an_end_that_is_ignored_is_shown(cluster: Cluster, path: str) -> None:
    shown = ask(cluster, path, skip_special_tokens=False, ignore_eos=True)
    assert shown == "a<|turn|><|end|>é<eos>"


@EVERY_PATH
def test_one_that_is_shown_can_stop_the_text(cluster: Cluster, path: str) -> None:
    assert ask(cluster, path, skip_special_tokens=False, stop=["<|end|>"]) == "a<|turn|>"
