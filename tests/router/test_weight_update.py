"""What a router makes of workers whose weights are replaced while they run."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

Cluster = Any


def served(cluster: Cluster) -> list[str]:
    return [model["id"] for model in json.loads(cluster.get("/v1/models")[1])["data"]]


def rename(cluster: Cluster, model_id: str, compat: str) -> None:
    for worker in cluster.workers:
        worker.instance.started_as = "tiny"
        worker.instance.model_id, worker.instance.compat = model_id, compat
        worker.instance.terms.weights = compat
    cluster.publish(*cluster.workers)


def test_a_router_serves_its_workers_under_the_name_of_their_new_weights(cluster: Cluster) -> None:
    rename(cluster, "tiny-2", "new")
    cluster.wait_until(lambda: served(cluster) == ["tiny-2"])
    status, answer = cluster.post("/v1/completions", {"model": "tiny-2", "prompt": "p"})
    assert (status, answer["model"]) == (200, "tiny-2")
    assert cluster.post("/v1/completions", {"model": "tiny", "prompt": "p"})[0] == 404


def test_both_legs_name_the_weights_that_the_pair_was_chosen_for(cluster: Cluster) -> None:
    rename(cluster, "tiny", "new")
    cluster.complete()
    assert [worker.started[-1].compat for worker in cluster.workers] == ["new", "new"]


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_says_what_its_weights_are_called(cluster: Cluster, stream: bool) -> None:
    for worker in cluster.workers:
        worker.instance.weights_version = "step 7: größer"
    rename(cluster, "tiny", "new")
    connection = cluster.connect(stream=stream)
    answer = connection.getresponse()
    told = answer.headers["x-diptych-weights-version"]
    answer.read()
    connection.close()
    assert unquote(told) == "step 7: größer"
    meta = cluster.post("/generate", {"text": "p"})[1]["meta_info"]
    assert meta["weight_version"] == "step 7: größer"
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub, request = inference_pb2_grpc.InferenceStub(channel), inference_pb2.GenerateRequest(text="p")
        *_, last = stub.GenerateStream(request) if stream else [stub.Generate(request)]
    assert last.weights_version == "step 7: größer"


def test_workers_with_different_weights_are_no_pair(cluster: Cluster) -> None:
    cluster.prefill().instance.terms.weights = "new"
    cluster.publish(*cluster.workers)
    status, answer = cluster.post("/v1/completions", {"prompt": "p"})
    assert status == 503
    assert "no prefill and decode worker may pair: different weights" in answer["error"]["message"]


def test_a_paused_worker_gets_nothing_new(start_cluster: Any) -> None:
    cluster = start_cluster(2, 1)
    cluster.prefill(0).instance.paused = True
    cluster.publish(*cluster.workers)
    for _ in range(4):
        cluster.complete()
    assert [len(worker.started) for worker in cluster.workers] == [0, 4, 4]


def test_a_leg_that_crossed_an_update_is_placed_elsewhere(start_cluster: Any, fail: Any) -> None:
    cluster = start_cluster(2, 1)
    cluster.prefill(0).faults = [fail(0, worker_pb2.ERROR_CODE_OVERLOADED)]
    cluster.prefill(1).faults = []
    for _ in range(2):
        assert cluster.complete()["finish_reason"] == "stop"
