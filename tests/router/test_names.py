"""What the model is called: its id, and the names that the operator gives it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any
StartCluster = Callable[..., Cluster]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def listed(cluster: Cluster) -> dict[str, Any]:
    models = json.loads(cluster.get("/v1/models")[1])["data"]
    return {model["id"]: model for model in models}


@pytest.fixture
def named(start_cluster: StartCluster) -> Cluster:
    return start_cluster(served_model_name=("gpt-ours", "org/other"), runtime_lora=True)


def test_a_model_says_its_context_and_its_root_as_vllms_clients_look_for_them(cluster: Cluster) -> None:
    (model,) = listed(cluster).values()
    assert (model["max_model_len"], model["context_len"], model["root"]) == (2048, 2048, "tiny")


def test_the_names_that_were_given_are_listed_and_lead_to_the_same_model(named: Cluster) -> None:
    models = listed(named)
    assert list(models) == ["gpt-ours", "org/other"]
    assert {model["root"] for model in models.values()} == {"tiny"}
    shown = [json.loads(named.get(f"/v1/models/{name}")[1])["id"] for name in ("gpt-ours", "org/other", "tiny")]
    assert shown == ["gpt-ours", "org/other", "tiny"]
    with grpc.insecure_channel(named.grpc_target) as channel:
        answer = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
    assert [model.id for model in answer.models] == ["gpt-ours", "org/other"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [("gpt-ours", "gpt-ours"), ("org/other", "org/other"), ("tiny", "tiny"), (None, "gpt-ours")],
)
def test_a_request_may_use_any_name_or_the_id(named: Cluster, asked: str | None, said: str) -> None:
    model = {} if asked is None else {"model": asked}
    apis: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
    ]
    for path, fields in apis:
        status, answer = named.post(path, {**model, **fields})
        assert (status, answer["model"]) == (200, said), path


def test_another_name_is_refused_by_those_that_are_told(named: Cluster) -> None:
    status, answer = named.post("/v1/completions", {"model": "gpt-4", "prompt": "p"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "gpt-ours and org/other" in answer["error"]["message"]


def test_no_adapter_takes_a_name_of_the_model(named: Cluster) -> None:
    status, answer = named.post("/v1/load_lora_adapter", {"lora_name": "gpt-ours", "lora_path": "/a"})
    assert (status, "--served-model-name" in answer["error"]["message"]) == (400, True)
    status, _ = named.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "/a"})
    assert (status, listed(named)["mine"]["parent"]) == (200, "gpt-ours")


@pytest.mark.parametrize("name", ["two words", "x" * 257, "line\n"])
def test_what_no_client_should_have_to_write_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name takes names of at most 256"):
        RouterConfig(served_model_name=(name,)).validate()
