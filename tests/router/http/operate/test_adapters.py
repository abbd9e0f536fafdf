"""Adapters: who may serve a request with one, what clients see, and loading them on all workers at run time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from simulated_worker import SimulatedWorker

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.common.members.terms import Terms
from diptych.router.choose.pairing import adapters, pair_up, with_adapter
from diptych.router.workers.worker_view import Pair, WorkerView
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from diptych.v1.inference_pb2 import GenerateRequest

Cluster = Any
StartCluster = Callable[..., Cluster]

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def view(instance_id: int, role: Role, loaded: dict[str, str], state: State = State.READY) -> WorkerView:
    return WorkerView(instance_id, role, state, "m", Terms(), True, frozenset(range(10)), loaded)


def test_a_pair_needs_the_same_weights_under_the_name_on_both_sides() -> None:
    workers = [
        view(1, Role.PREFILL, {"a": "old", "b": "x"}),
        view(2, Role.PREFILL, {"a": "new"}),
        view(3, Role.DECODE, {"a": "new", "b": "x"}),
        view(4, Role.DECODE, {}),
    ]
    pairs = pair_up(workers, "m")
    assert len(pairs) == 4
    assert with_adapter(pairs, workers, "a") == (Pair(2, 3),)
    assert with_adapter(pairs, workers, "b") == (Pair(1, 3),)
    assert with_adapter(pairs, workers, "c") == ()
    assert adapters(workers) == ("a", "b")
    assert adapters(workers[:2]) == ()


def test_what_only_a_worker_has_that_is_not_ready_is_not_offered() -> None:
    workers = [view(1, Role.PREFILL, {"a": "x"}, State.DRAINING), view(2, Role.DECODE, {"a": "x"})]
    assert adapters(workers) == ()


@pytest.fixture
def cluster(start_cluster: StartCluster) -> Cluster:
    return start_cluster(prefill=2, decode=2, runtime_lora=True)


def loaded(cluster: Cluster) -> list[dict[str, str]]:
    return [{adapter.name: adapter.fingerprint for adapter in w.instance.loras} for w in cluster.workers]


def load(cluster: Cluster, name: str = "ada", path: str = "/x") -> tuple[int, Any]:
    status, answer = cluster.post(LOAD, {"lora_name": name, "lora_path": path})
    return status, answer


def models(cluster: Cluster) -> dict[str, str | None]:
    """Each model's parent."""
    status, body = cluster.get("/v1/models")
    assert status == 200
    return {model["id"]: model.get("parent") for model in json.loads(body)["data"]}


def test_an_adapter_is_loaded_listed_used_and_unloaded(cluster: Cluster) -> None:
    assert load(cluster) == (200, {"lora_name": "ada", "num_workers": 4})
    assert loaded(cluster) == [{"ada": "/x"}] * 4
    assert list(models(cluster).items()) == [("tiny", None), ("ada", "tiny")]
    assert cluster.get("/v1/models/ada")[0] == 200
    status, answer = cluster.post("/v1/completions", {"model": "ada", "prompt": "p"})
    assert (status, answer["model"]) == (200, "ada")
    assert {leg.lora for worker in cluster.workers for leg in worker.started} == {"ada"}
    assert cluster.post(UNLOAD, {"lora_name": "ada"}) == (200, {"lora_name": "ada", "num_workers": 4})
    assert models(cluster) == {"tiny": None}
    status, answer = cluster.post("/v1/completions", {"model": "ada", "prompt": "p"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("fields", [{"lora_path": "ada"}, {"lora_path": "ada", "model": "tiny"}])
def test_an_adapter_may_be_named_as_sglangs_clients_do(cluster: Cluster, fields: Any) -> None:
    load(cluster)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "p"}, "/v1/chat/completions": chat}
    for path, body in bodies.items():
        status, answer = cluster.post(path, {**body, **fields})
        assert (status, answer["model"]) == (200, "ada")
        assert cluster.post(path, {**body, "lora_path": "bob"})[0] == 404
        assert cluster.post(path, {**body, "model": "tiny", "lora_path": ""})[1]["model"] == "tiny"
    assert sorted({leg.lora for worker in cluster.workers for leg in worker.started}) == ["", "ada"]


def test_a_request_for_the_model_runs_without_an_adapter(cluster: Cluster) -> None:
    load(cluster)
    for model in ("", "tiny"):
        assert cluster.complete(model=model)
    assert {leg.lora for worker in cluster.workers for leg in worker.started} == {""}


def test_a_chat_stream_carries_the_adapters_name(cluster: Cluster) -> None:
    load(cluster)
    body = {"model": "ada", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    connection = cluster.connect(**{"prompt": "p", "model": "ada", "stream": True})
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert {json.loads(event.removeprefix("data: "))["model"] for event in events if "{" in event} == {"ada"}
    status, _ = cluster.post("/v1/chat/completions", body | {"stream": False})
    assert status == 200


def test_grpc_lists_and_runs_adapters(cluster: Cluster) -> None:
    load(cluster)
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        listed = stub.ListModels(inference_pb2.ListModelsRequest()).models
        assert [(model.id, model.parent) for model in listed] == [("tiny", ""), ("ada", "tiny")]
        assert stub.Generate(GenerateRequest(text="p", model="ada")).model == "ada"
        with pytest.raises(grpc.RpcError) as error:
            stub.Generate(GenerateRequest(text="p", model="bob"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_requests_go_only_to_workers_that_have_the_adapter(cluster: Cluster) -> None:
    has = [cluster.prefill(1), cluster.decode(0)]
    for worker in has:
        worker.instance.loras.add(name="ada", fingerprint="x")
    cluster.prefill(0).instance.loras.add(name="ada", fingerprint="other weights")
    cluster.publish(*cluster.workers)
    for _ in range(6):
        cluster.complete(model="ada")
    assert [len(worker.started) for worker in cluster.workers] == [0, 6, 6, 0]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_a_load_that_fails_on_one_worker_is_taken_back_from_all(
    cluster: Cluster, code: grpc.StatusCode, status: int
) -> None:
    cluster.decode(1).admin.failure = code
    found, answer = load(cluster)
    assert found == status
    assert "told to fail" in answer["error"]["message"]
    assert "decode worker" in answer["error"]["message"]
    assert loaded(cluster) == [{}] * 4
    cluster.decode(1).admin.failure = None
    assert load(cluster)[0] == 200


def test_taking_back_spares_who_had_the_adapter_before(cluster: Cluster) -> None:
    cluster.prefill(0).instance.loras.add(name="ada", fingerprint="/x")
    cluster.decode(1).admin.failure = grpc.StatusCode.INVALID_ARGUMENT
    assert load(cluster)[0] == 400
    assert loaded(cluster) == [{"ada": "/x"}, {}, {}, {}]


def test_loading_again_completes_what_a_new_worker_lacks(cluster: Cluster) -> None:
    load(cluster)
    newcomer: SimulatedWorker = cluster.add_worker(999, cluster.decode().instance.role)
    cluster.publish(*cluster.workers)
    assert load(cluster) == (200, {"lora_name": "ada", "num_workers": 5})
    assert [adapter.name for adapter in newcomer.instance.loras] == ["ada"]


def test_an_unknown_adapter_cannot_be_unloaded(cluster: Cluster) -> None:
    status, answer = cluster.post(UNLOAD, {"lora_name": "bob"})
    assert (status, answer["error"]["code"]) == (404, "not_found")


def test_an_adapter_that_some_lack_is_unloaded_from_the_others(cluster: Cluster) -> None:
    cluster.prefill(0).instance.loras.add(name="ada", fingerprint="/x")
    cluster.publish(*cluster.workers)
    assert cluster.post(UNLOAD, {"lora_name": "ada"}) == (200, {"lora_name": "ada", "num_workers": 1})


def test_a_worker_that_lost_the_adapter_meanwhile_is_passed_over(cluster: Cluster, fail: Any) -> None:
    load(cluster)
    cluster.prefill(0).faults.append(fail(0, worker_pb2.ERROR_CODE_OVERLOADED))
    for _ in range(4):
        cluster.complete(model="ada")


def test_a_request_whose_adapter_is_unloaded_before_it_runs_is_404(start_cluster: StartCluster, fail: Any) -> None:
    cluster = start_cluster(runtime_lora=True, lost_pair_wait_s=0.2)
    load(cluster)

    def gone(leg: worker_pb2.StartLeg) -> Any:
        for worker in cluster.workers:
            del worker.instance.loras[:]
            worker._send_record()
        return [], 0

    cluster.prefill()._recite = gone
    cluster.prefill().faults.append(fail(0, worker_pb2.ERROR_CODE_OVERLOADED))
    status, answer = cluster.post("/v1/completions", {"model": "ada", "prompt": "p"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_name": "a"}, "lora_path"),
        (LOAD, {"lora_name": 1, "lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "a", "lora_path": "/x", "force": True}, "force"),
        (UNLOAD, {}, "lora_name"),
        (UNLOAD, b"{", None),
    ],
)
def test_a_body_that_is_wrong_is_400(cluster: Cluster, path: str, body: Any, param: str | None) -> None:
    status, answer = cluster.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert sum(worker.admin.num_calls for worker in cluster.workers) == 0


def test_without_the_option_the_paths_say_which_it_is(start_cluster: StartCluster) -> None:
    status, answer = load(start_cluster())
    assert (status, "--runtime-lora" in answer["error"]["message"]) == (404, True)


def test_without_workers_a_load_is_503(cluster: Cluster) -> None:
    cluster.publish()
    assert load(cluster)[0] == 503
