"""What decides who goes first on a worker reaches both legs."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2_grpc
from diptych.v1.inference_pb2 import GenerateRequest

Cluster = Any


def legs(cluster: Cluster) -> set[tuple[int, str]]:
    """Priority and tenant of each leg started last."""
    return {(worker.started[-1].priority, worker.started[-1].tenant) for worker in cluster.workers}


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
    status, _ = cluster.post(path, {**fields, "priority": 3, "cache_salt": "salt"}, {"x-tenant": "gold"})
    assert status == 200
    assert legs(cluster) == {(3, "gold")}
    assert {worker.started[-1].cache_salt for worker in cluster.workers} == {b"salt"}


def test_grpc(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        inference_pb2_grpc.InferenceStub(channel).Generate(GenerateRequest(text="p", priority=7, tenant="gold"))
    assert legs(cluster) == {(7, "gold")}
