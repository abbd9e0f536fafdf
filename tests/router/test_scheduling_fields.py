"""What decides who goes first on a worker reaches both legs."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from diptych.router.values.request import DEFAULT_ROUTING, Routing
from diptych.tokens.packed_tokens import pack
from diptych.v1 import inference_pb2_grpc
from diptych.v1.inference_pb2 import GenerateRequest

Cluster = Any


def legs(cluster: Cluster) -> set[tuple[int, str]]:
    """Priority and tenant of each leg started last."""
    return {(worker.started[-1].priority, worker.started[-1].tenant) for worker in cluster.workers}


def predictions(cluster: Cluster) -> list[bytes]:
    """What prefill and decode were told."""
    return sorted(worker.started[-1].prediction for worker in cluster.workers)


@pytest.mark.parametrize(
    ("fields", "headers", "leg"),
    [
        ({}, {}, (0, "")),
        ({"priority": -5}, {"x-tenant": "gold"}, (-5, "gold")),
        ({"user": "ann"}, {}, (0, "ann")),
        ({"user": "ann"}, {"x-tenant": "gold"}, (0, "gold")),
    ],
)
def test_http(cluster: Cluster, fields: dict[str, Any], headers: dict[str, str], leg: tuple[int, str]) -> None:
    status, _ = cluster.post("/v1/completions", {"prompt": "p", **fields}, headers)
    assert status == 200
    assert legs(cluster) == {leg}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "p"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "p"}),
        ("/generate", {"text": "p"}),
    ],
)
def test_every_api_takes_them(cluster: Cluster, path: str, fields: dict[str, Any]) -> None:
    said = {"priority": 3, "cache_salt": "salt", "speculate": "ngram"}
    status, _ = cluster.post(path, {**fields, **said}, {"x-tenant": "gold"})
    assert status == 200
    assert legs(cluster) == {(3, "gold")}
    assert {worker.started[-1].cache_salt for worker in cluster.workers} == {b"salt"}
    assert {worker.started[-1].speculate for worker in cluster.workers} == {"ngram"}


def test_grpc(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        request = GenerateRequest(text="p", priority=7, tenant="gold", speculate="off", prediction="q")
        inference_pb2_grpc.InferenceStub(channel).Generate(request)
    assert legs(cluster) == {(7, "gold")}
    assert {worker.started[-1].speculate for worker in cluster.workers} == {"off"}
    assert predictions(cluster) == [b"", pack(cluster.tokenizer.encode("q"))]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("content", ["Zoë", [{"type": "text", "text": "Zo"}, {"type": "text", "text": "ë"}]])
def test_who_decodes_hears_what_the_client_thinks_that_the_answer_will_be(
    cluster: Cluster, content: Any, path: str
) -> None:
    prompts: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
        "/v1/completions": {"prompt": "p"},
        "/generate": {"text": "p"},
    }
    status, _ = cluster.post(path, {**prompts[path], "prediction": {"type": "content", "content": content}})
    assert status == 200
    assert predictions(cluster) == [b"", pack(cluster.tokenizer.encode("Zoë"))]


@pytest.mark.parametrize("name", ["agent_hints", "nvext"])
def test_hints_of_agents_reach_the_workers_by_either_name(cluster: Cluster, name: str) -> None:
    hints = {"priority": 4, "osl": 700}
    said = {"agent_hints": hints} if name == "agent_hints" else {"nvext": {"agent_hints": hints}}
    status, _ = cluster.post("/v1/completions", {"prompt": "p", **said})
    assert status == 200
    assert legs(cluster) == {(4, "")}
    assert {worker.started[-1].expected_output_tokens for worker in cluster.workers} == {700}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agent_hints": {"osl": 0}}, "agent_hints.osl"),
        ({"agent_hints": {"osl": 2**40}}, "agent_hints.osl"),
        ({"agent_hints": {"tool": "x" * 65}}, "agent_hints.tool"),
        ({"agent_hints": {"priority": 101}}, "agent_hints.priority"),
        ({"nvext": {"agent_hints": {"speculative_prefill": True}}}, "nvext.agent_hints.speculative_prefill"),
        ({"nvext": {"annotations": ["x"]}}, "nvext.annotations"),
        ({"priority": 1, "agent_hints": {"priority": 2}}, "give one of them"),
        ({"agent_hints": {"osl": 1}, "nvext": {"agent_hints": {"osl": 2}}}, "give one of them"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
    ],
)
def test_hints_that_are_wrong_are_refused_in_words(cluster: Cluster, fields: dict[str, Any], words: str) -> None:
    status, answer = cluster.post("/v1/completions", {"prompt": "p", **fields})
    assert status == 400
    assert words in str(answer)


def test_a_cache_key_names_a_group_where_no_session_is_named() -> None:
    assert DEFAULT_ROUTING.in_group("team").session == "team"
    assert Routing(session="mine").in_group("team").session == "mine"
    assert DEFAULT_ROUTING.in_group("") is DEFAULT_ROUTING


def test_a_cache_key_shares_no_cache(cluster: Cluster) -> None:
    """It is a client's text, and names no namespace."""
    for key in ("a", "b"):
        cluster.post("/v1/completions", {"prompt": "p", "prompt_cache_key": key, "cache_salt": "s"})
        assert {worker.started[-1].cache_salt for worker in cluster.workers} == {b"s"}
