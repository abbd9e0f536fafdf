"""Several models behind one router: three, of which one makes vectors, each with simulated workers of its own.

All workers are linked to all, on equal terms: only what they were started with keeps the models apart.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import openai
import pytest

from diptych.architectures.pooling import Pooling
from diptych.common.errors import ConfigError
from diptych.router import batches_wiring
from diptych.router.admission.in_flight import InFlightRequest
from diptych.router.batches import lanes
from diptych.router.batches.idle import Busy
from diptych.router.config import RouterConfig
from diptych.router.http.openai import batch_lines
from diptych.router.main import open_served_models
from diptych.router.serve.models import Models
from diptych.router.values.slo_tiers import NO_TIER
from diptych.v1 import inference_pb2, inference_pb2_grpc
from diptych.v1.inference_pb2 import DetokenizeRequest, EmbedRequest, GenerateRequest, TokenizeRequest, VectorOptions

Cluster = Any
Start = Callable[..., Cluster]
EMBED = Pooling("embed", "last", normalize=True)
MODELS = ("tiny", "other", "vectors")
UNKNOWN = "the model 'none' does not exist; this router serves tiny and other and vectors"
UNNAMED = "this router serves tiny and other and vectors: name one of them"
TEXT_PATHS: Mapping[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/completions": {"prompt": "p"},
    "/v1/responses": {"input": "p"},
    "/v1/messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 9},
    "/generate": {"text": "p"},
}
OTHER_PATHS: Mapping[str, Any] = {
    "/v1/embeddings": {"input": "p"},
    "/tokenize": {"prompt": "p"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "p"}]},
}


@pytest.fixture(scope="module")
def shared(start_shared_cluster: Start) -> Cluster:
    further = {"other": None, "vectors": EMBED}
    return start_shared_cluster(further=further, runtime_lora=True, console_text=True)


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    for worker in shared.workers:
        worker.started.clear()
    return shared


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[Any]:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def served_by(cluster: Cluster) -> dict[str, int]:
    """Return how many legs the workers of each model have got; none: left out."""
    found: dict[str, int] = {}
    for worker in cluster.workers:
        if worker.started:
            found[worker.instance.model_id] = found.get(worker.instance.model_id, 0) + len(worker.started)
    return found


@pytest.mark.parametrize("path", TEXT_PATHS)
@pytest.mark.parametrize("model", ["tiny", "other"])
def test_a_request_reaches_only_workers_of_the_model_that_it_names(cluster: Cluster, path: str, model: str) -> None:
    for _ in range(4):
        status, answer = cluster.post(path, {**TEXT_PATHS[path], "model": model})
        assert status == 200, answer
        assert answer.get("model", model) == model
    assert served_by(cluster) == {model: 8}, "a prefill leg and a decode leg each"


def test_a_stream_does_so_too(cluster: Cluster) -> None:
    with cluster.ask(model="other", stream=True) as answer:
        events = answer.read().decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["model"] == "other"
    assert served_by(cluster) == {"other": 2}


def test_vectors_are_of_the_model_that_makes_them(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="vectors", input=["p", "q"], encoding_format="float")
        assert (found.model, [len(each.embedding) for each in found.data]) == ("vectors", [3, 3])
        with pytest.raises(openai.BadRequestError, match="other makes text, no vectors"):
            client.embeddings.create(model="other", input="p")
        with pytest.raises(openai.BadRequestError, match="vectors makes no text"):
            client.completions.create(model="vectors", prompt="p")
    assert served_by(cluster) == {"vectors": 2}


def test_grpc_calls_reach_only_workers_of_the_model_that_they_name(cluster: Cluster, stub: Any) -> None:
    assert stub.Generate(GenerateRequest(text="p", model="other")).model == "other"
    assert list(stub.GenerateStream(GenerateRequest(text="p", model="other")))[-1].finish_reason
    assert served_by(cluster) == {"other": 4}
    embedded = stub.Embed(EmbedRequest(texts=["p"], options=VectorOptions(model="vectors")))
    assert (embedded.model, served_by(cluster)) == ("vectors", {"other": 4, "vectors": 1})
    made = stub.Tokenize(TokenizeRequest(text="ab", model="other"))
    assert (made.context_len, list(made.token_ids)) == (2048, cluster.tokenizer.encode("ab"))
    assert stub.Detokenize(DetokenizeRequest(token_ids=made.token_ids, model="tiny")).text == "ab"
    assert [each.id for each in stub.ListModels(inference_pb2.ListModelsRequest()).models] == list(MODELS)


def test_grpc_calls_are_told_what_there_is(stub: Any) -> None:
    calls: list[tuple[Any, Any]] = [
        (stub.Generate, GenerateRequest(text="p")),
        (stub.Tokenize, TokenizeRequest(text="p")),
        (stub.Detokenize, DetokenizeRequest(token_ids=[1])),
        (stub.Embed, EmbedRequest(texts=["p"])),
    ]
    for call, request in calls:
        with pytest.raises(grpc.RpcError) as error:
            call(request)
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, UNNAMED)
    with pytest.raises(grpc.RpcError) as error:
        list(stub.GenerateStream(GenerateRequest(text="p", model="none")))
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.NOT_FOUND, UNKNOWN)


@pytest.mark.parametrize("path", [*TEXT_PATHS, *OTHER_PATHS])
def test_a_name_that_nobody_has_and_no_name_are_refused_with_what_there_is(cluster: Cluster, path: str) -> None:
    body = {**TEXT_PATHS, **OTHER_PATHS}[path]
    status, answer = cluster.post(path, {**body, "model": "none"})
    assert (status, answer["error"]["message"]) == (404, UNKNOWN)
    if "/messages" not in path:  # whose bodies must have a model
        status, answer = cluster.post(path, {**body, "model": ""})
        assert (status, answer["error"]["message"]) == (400, UNNAMED)
    assert served_by(cluster) == {}


def test_all_models_are_listed_and_each_is_shown(cluster: Cluster) -> None:
    listed = json.loads(cluster.get("/v1/models")[1])["data"]
    assert [(each["id"], each["root"], each["purpose"]) for each in listed] == [
        ("tiny", "tiny", "generate"),
        ("other", "other", "generate"),
        ("vectors", "vectors", "embed"),
    ]
    assert [json.loads(cluster.get(f"/v1/models/{name}")[1])["id"] for name in MODELS] == list(MODELS)
    assert cluster.get("/v1/models/none")[0] == 404
    assert json.loads(cluster.get("/get_model_info?model=other")[1])["model_path"] == "other"
    assert cluster.get("/get_model_info")[0] == 400


def test_no_pair_has_workers_of_two_models_though_all_are_linked_on_equal_terms(cluster: Cluster) -> None:
    models = {worker.instance.instance_id: worker.instance.model_id for worker in cluster.workers}
    assert len({worker.instance.compat for worker in cluster.workers}) == 1
    tiny, other = cluster.router.serving.served[0].fleet, cluster.router.serving.served[1].fleet
    session = tiny.session(cluster.prefill().instance.instance_id)
    assert cluster.decode(1).instance.instance_id in session.view().linked, "of the other model"
    for fleet, model in ((tiny, "tiny"), (other, "other")):
        pairs = [*fleet.pairs(), *fleet.singles(), *fleet.successions()]
        assert {models[each] for pair in pairs for each in (pair.prefill_id, pair.decode_id)} == {model}


def test_what_is_learned_of_one_model_is_not_expected_of_another(start_cluster: Start) -> None:
    cluster = start_cluster(further={"other": None})
    first, second = (served.fleet.estimates for served in cluster.router.serving.served)
    before = first.output_len
    assert second.output_len == before
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "other", "max_tokens": 3})[0] == 200
    cluster.wait_until(lambda: second.output_len != before)
    assert first.output_len == before
    learning = [session.estimates for session in cluster.router.fleet.sessions()]
    assert [learning.count(each) for each in (first, second)] == [2, 2]


def test_an_adapter_is_its_models_and_picks_it(cluster: Cluster) -> None:
    status, answer = cluster.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/sql"})
    assert (status, answer["error"]["param"]) == (400, "base_model_name")
    load = {"lora_name": "sql", "lora_path": "/sql", "base_model_name": "other"}
    assert cluster.post("/v1/load_lora_adapter", load) == (200, {"lora_name": "sql", "num_workers": 2})
    listed = json.loads(cluster.get("/v1/models")[1])["data"]
    assert [(each["id"], each["parent"]) for each in listed if "parent" in each] == [("sql", "other")]
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "sql"})[0] == 200
    assert served_by(cluster) == {"other": 2}
    status, answer = cluster.post("/v1/load_lora_adapter", {**load, "base_model_name": "tiny"})
    assert (status, answer["error"]["message"]) == (400, "another model has an adapter 'sql': give it another name")
    status, answer = cluster.post("/v1/load_lora_adapter", {**load, "lora_name": "tiny"})
    assert status == 400, "a model's name"
    assert cluster.post("/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 200
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "sql"})[0] == 404


def test_a_session_is_of_one_model_and_waits_for_room_in_its_workers_pools(cluster: Cluster) -> None:
    pages = {"tiny": 100, "other": 50}
    for worker in cluster.workers:
        worker.instance.load.total_pages = pages.get(worker.instance.model_id, 0)
        cluster.report_load(worker, worker.instance.load)
    tiny, other, _ = cluster.router.serving.desk.doors
    cluster.wait_until(lambda: tiny.capacity_tokens == 2 * other.capacity_tokens > 0)

    def opened(name: str, **fields: Any) -> Any:
        fields = {"capacity_of_str_len": 10**6, "context_tokens": 10**6, "session_id": name, **fields}
        return cluster.post("/open_session", fields)

    assert opened("a", model="tiny", wait_s=100) == (200, "a")
    assert opened("b", model="other", wait_s=100) == (200, "b")
    assert opened("c", model="other", wait_s=0.001)[0] == 503
    assert [door.line.num_in for door in cluster.router.serving.desk.doors] == [1, 1, 0]
    assert opened("a", model="other", wait_s=100)[0] == 400, "it is open for another model"
    assert opened("d")[1]["error"]["message"] == UNNAMED
    assert opened("d", model="none")[1]["error"]["message"] == UNKNOWN
    assert opened("d", model="other") == (200, "d")
    turn = {"text": "p", "session_params": {"id": "d"}}
    assert cluster.post("/generate", {**turn, "model": "other"})[0] == 200
    status, answer = cluster.post("/generate", {**turn, "model": "tiny"})
    assert (status, answer["error"]["message"]) == (400, "the session 'd' was opened for another model")
    for name in "abcd":
        assert cluster.post("/close_session", {"session_id": name}) == (200, {"was_open": True})


def test_a_call_is_aborted_by_its_id_whichever_model_serves_it(cluster: Cluster, hang: Any) -> None:
    cluster.decode(1).faults = [hang(1)]
    with cluster.ask(model="other", stream=True, rid="call") as answer:
        answer.readline()
        assert cluster.post("/abort_request", {"rid": "call"}) == (200, {"num_aborted": 1})
        assert b"abort" in answer.read()
    cluster.wait_for(lambda: cluster.decode(1).aborted)
    cluster.release(cluster.decode(1))


def test_a_model_without_workers_answers_503_while_the_others_serve(start_cluster: Start) -> None:
    cluster = start_cluster(further={"other": None}, pair_wait_s=0.0)
    everybody = list(cluster.workers)
    others = [worker for worker in everybody if worker.instance.model_id == "other"]
    cluster.publish(*[worker for worker in everybody if worker not in others])
    cluster.wait_until(lambda: not cluster.router.serving.served[1].fleet.pairs())
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "model": "other"})
    assert status == 503
    assert "no prefill worker for other is usable: none is registered" in answer["error"]["message"]
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "tiny"})[0] == 200
    assert cluster.get("/health/ready")[0] == 200, "it serves one"
    cluster.publish()
    cluster.wait_until(lambda: cluster.get("/health/ready")[0] == 503)
    assert "for tiny" in cluster.get("/health/ready")[1]
    assert "for other" in cluster.get("/health/ready")[1]
    cluster.publish(*others)
    cluster.wait_until(lambda: cluster.get("/health/ready")[0] == 200)
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "other"})[0] == 200
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "tiny"})[0] == 503


def test_each_line_of_a_batch_is_served_by_the_model_that_it_names(
    start_cluster: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "LEARNING_S", 0.0)  # a name that is not known is refused at once
    monkeypatch.setattr(batches_wiring, "TICK_S", 0.02)
    monkeypatch.setattr(batches_wiring, "LOOK_S", 0.05)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    cluster = start_cluster(further={"other": None}, batch_store=str(tmp_path))
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "p"}}
        for model in ("tiny", "other", "none")
    ]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        data = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        cluster.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        found = [json.loads(line) for line in client.files.content(ended.output_file_id or "").text.splitlines()]
        (failed,) = client.files.content(ended.error_file_id or "").text.splitlines()
    assert {each["custom_id"]: each["response"]["body"]["model"] for each in found} == {
        "tiny": "tiny",
        "other": "other",
    }
    assert (json.loads(failed)["custom_id"], json.loads(failed)["response"]["status_code"]) == ("none", 404)
    assert served_by(cluster) == {"tiny": 2, "other": 2}


def test_lines_of_a_model_without_workers_do_not_stop_a_batch(
    start_cluster: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "STILL_S", 0.05)
    monkeypatch.setattr(lanes, "REREAD_S", 0.05)
    monkeypatch.setattr(batches_wiring, "TICK_S", 0.02)
    monkeypatch.setattr(batches_wiring, "LOOK_S", 0.05)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    cluster = start_cluster(further={"other": None}, batch_store=str(tmp_path), pair_wait_s=0.0)
    everybody = list(cluster.workers)
    cluster.publish(*[worker for worker in everybody if worker.instance.model_id == "tiny"])
    cluster.wait_until(lambda: not cluster.router.serving.served[1].fleet.pairs())
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "p"}}
        for number, model in enumerate(["other"] * 17 + ["tiny"])
    ]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        data = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def num_completed() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts.completed if counts else 0

        cluster.wait_until(lambda: num_completed() == 1)
        assert served_by(cluster) == {"tiny": 2}
        client.batches.cancel(batch.id)


def test_a_batch_s_lines_heed_the_workers_of_their_own_model_only(start_cluster: Start) -> None:
    cluster = start_cluster(further={"other": None})
    tiny, other = ([each for each in cluster.workers if each.instance.model_id == name] for name in ("tiny", "other"))
    served, pipelines = (
        cluster.router.serving.served,
        Models([each.pipeline for each in cluster.router.serving.served], cluster.router.serving.desk),
    )
    watched = [batches_wiring.Watched(each.fleet, each.in_flight) for each in served]
    watcher = batches_wiring.Watcher(watched, cluster.router.serving.shared.admission, 8)
    idle = Busy(0, 0, 8, 0, 0, 0, num_prefill=1, free_share=1.0, is_cold=False)
    numbers = [batches_wiring.number_of(pipelines, name) for name in ("tiny", "other", "none", "")]
    assert numbers == [0, 1, batches_wiring.NO_MODEL, batches_wiring.NO_MODEL]
    assert [watcher.busy(number, 0) for number in numbers] == [idle] * 4
    unanswered: Any = SimpleNamespace(first_s=0.0)
    with served[1].in_flight.holding(InFlightRequest(NO_TIER, 0.0, unanswered, lambda: 0.0)):
        assert [watcher.busy(number, 0).num_unanswered for number in numbers] == [0, 1, 0, 0]
    cluster.publish(*tiny)
    cluster.wait_until(lambda: not served[1].fleet.pairs())
    away = idle._replace(num_prefill=0, free_share=0.0, is_cold=True)
    assert [watcher.busy(number, 0) for number in numbers] == [idle, away, idle, idle]
    cluster.publish(*other)
    cluster.wait_until(lambda: served[1].fleet.pairs() and not served[0].fleet.pairs())
    assert [watcher.busy(number, 0) for number in numbers] == [away, idle, idle, idle]


def test_an_adapter_that_only_some_workers_of_a_model_have_can_be_unloaded(start_cluster: Start) -> None:
    cluster = start_cluster(further={"other": None}, runtime_lora=True)
    keeps_it = cluster.prefill(1)  # and the only decode worker was replaced by one that does not have it
    assert keeps_it.instance.model_id == "other"
    keeps_it.instance.loras.add(name="sql", fingerprint="/sql")
    cluster.publish(*cluster.workers)
    assert "sql" not in cluster.router.serving.served[1].fleet.adapters()
    load = {"lora_name": "sql", "lora_path": "/sql"}
    status, answer = cluster.post("/v1/load_lora_adapter", {**load, "base_model_name": "tiny"})
    assert (status, answer["error"]["param"]) == (400, "lora_name")
    unload = {"lora_name": "sql"}
    assert cluster.post("/v1/unload_lora_adapter", unload) == (200, {"lora_name": "sql", "num_workers": 1})
    assert not any(worker.instance.loras for worker in cluster.workers)
    assert cluster.post("/v1/unload_lora_adapter", unload)[0] == 404


def test_an_adapter_s_name_that_two_models_have_needs_the_model_s_to_be_unloaded(start_cluster: Start) -> None:
    cluster = start_cluster(further={"other": None}, runtime_lora=True)
    for worker in cluster.workers:  # each was started with one
        worker.instance.loras.add(name="sql", fingerprint="/sql")
    cluster.publish(*cluster.workers)
    status, answer = cluster.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert (status, answer["error"]["param"]) == (400, "base_model_name")
    unload = {"lora_name": "sql", "base_model_name": "other"}
    assert cluster.post("/v1/unload_lora_adapter", unload)[0] == 200
    assert {worker.instance.model_id for worker in cluster.workers if worker.instance.loras} == {"tiny"}


def test_further_models_are_opened_under_their_names_and_told_apart() -> None:
    config = RouterConfig(
        model="smollm2", served_model_name=("small",), tool_parser="hermes", further_models=("big=sim",)
    )
    small, big = open_served_models(config)
    assert (small.names, big.names) == (("small",), ("big",))
    assert small.model_id != big.model_id
    for twice in ("sim,sim", "small=sim"):
        with pytest.raises(ConfigError, match="two models are called"):
            open_served_models(replace(config, further_models=tuple(twice.split(","))))
    with pytest.raises(ConfigError, match="--further-models takes PATH or NAME=PATH, not 'big='"):
        replace(config, further_models=("big=",)).validate()
