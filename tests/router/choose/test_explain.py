from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.router.choose.explain import Explanations
from diptych.router.values.request import ClientRequest, GenerationRequest, Tokenized
from diptych.v1 import bootstrap_pb2, worker_pb2
from diptych.v1.worker_pb2 import LegStats


def explained(cluster: Any, request_id: str) -> Any:
    (request,) = cluster.router.dispatcher.explanations.find(request_id)["requests"]
    return request["attempts"]


def post(cluster: Any, request_id: str, **headers: str) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 4}
    assert cluster.post("/v1/completions", body, {"x-request-id": request_id, **headers})[0] == 200


def test_a_decision_is_explained_with_all_candidates_and_what_came_of_it(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster(prefill=2, decode=2, policy="pair_cost")
    cluster.prefill(0).instance.load.MergeFrom(
        bootstrap_pb2.WorkerLoad(waiting_tokens=10_000, num_waiting=1, num_waiting_prompts=1)
    )
    cluster.report_load(cluster.prefill(0), cluster.prefill(0).instance.load)
    cluster.wait_until(lambda: cluster.router.fleet.session(100).load().queued_tokens)
    post(cluster, "why")
    (attempt,) = explained(cluster, "why")
    assert (attempt["policy"], attempt["outcome"], attempt["prompt_tokens"]) == ("pair_cost", "length", 100)
    assert attempt["prefill_instance"] == f"{101:016x}"
    assert attempt["predicted_ttft_s"] == pytest.approx(0.015)
    assert 0 < attempt["ttft_s"] <= attempt["duration_s"]
    assert [worker["queued_tokens"] for worker in attempt["workers"]] == [10_000, 0, 0, 0]
    totals = [pair["total_s"] for pair in attempt["pairs"]]
    assert len(totals) == 4
    assert totals == sorted(totals)
    assert attempt["pairs"][-1]["queue_s"] == pytest.approx(1.005)
    assert cluster.router.fleet.estimates.usual.busy == 0.5  # one of both had a prompt to compute


def without_contexts(cluster: Any) -> Any:
    decode = cluster.decode(0)
    decode.instance.load.total_pages = decode.instance.load.free_pages
    cluster.report_load(decode, decode.instance.load)
    cluster.wait_until(lambda: cluster.router.fleet.session(101).load().context_tokens == 0)
    return cluster


def test_a_policy_is_told_what_is_usual(start_cluster: Callable[..., Any]) -> None:
    cluster = without_contexts(start_cluster(policy="pair_cost"))
    cluster.router.fleet.estimates.prefilled(100, 100, 300, 1e-4)  # prompts are short, so outputs have slack
    post(cluster, "usual")
    (attempt,) = explained(cluster, "usual")
    assert 0 < attempt["pairs"][0]["later"] < 0.5


def test_a_policy_is_told_the_slo_that_the_operator_set(start_cluster: Callable[..., Any]) -> None:
    cluster = without_contexts(start_cluster(policy="pair_cost", ttft_slo_ms=10.0, tpot_slo_ms=10_000.0))
    cluster.router.fleet.estimates.prefilled(100, 100, 300, 0.01)
    post(cluster, "slo")
    (attempt,) = explained(cluster, "slo")
    assert 0 < attempt["pairs"][0]["later"] < 0.02


def test_every_attempt_is_explained_with_its_failure(
    start_cluster: Callable[..., Any], fail: Callable[..., Any]
) -> None:
    cluster = start_cluster(decode=2, policy="round_robin")
    cluster.decode(0).faults = [fail(0, worker_pb2.ERROR_CODE_RETRACTED)]
    post(cluster, "twice")
    first, second = explained(cluster, "twice")
    assert (first["outcome"], second["outcome"]) == ("failed: decode leg: RETRACTED: told to fail", "length")
    assert (first["decode_instance"], second["decode_instance"]) == (f"{101:016x}", f"{102:016x}")
    assert first["scores"] == {"prefill": {f"{100:016x}": 0.0}, "decode": {f"{101:016x}": 0.0, f"{102:016x}": 0.0}}


def test_the_oldest_are_forgotten() -> None:
    explanations = Explanations(2)
    for request_id in ("a", "b", "c", "c"):
        explanations.begin(request_id, 0.0)
    assert explanations.find("b") is None
    assert explanations.find("c") == {"request_id": "c", "requests": [{"attempts": []}] * 2}


def test_the_first_token_is_predicted_once_speeds_are_known(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster(policy="pair_cost")
    params = SamplingParams(max_tokens=4)
    client = ClientRequest("", [], params, life=Life("r", 0.0, 1.0))
    request = GenerationRequest(client, Tokenized([1] * 500), params, 600.0)
    selector = cluster.router.dispatcher.selector
    assert selector.predict_ttft(request) is None
    stats = LegStats(compute_us=200_000)
    cluster.prefill().stats = stats
    post(cluster, "measured")
    cluster.wait_until(lambda: selector.predict_ttft(request))
    assert selector.predict_ttft(request) == pytest.approx(0.2 * (0.005 + 0.05) / (0.005 + 0.01), rel=0.1)


def test_attempts_are_counted_by_policy_and_expectations_by_their_error(
    start_cluster: Callable[..., Any],
) -> None:
    cluster = start_cluster(prefill=0, decode=0, unified=1, policy="pair_cost")
    post(cluster, "one")
    text = cluster.get("/metrics")[1]
    assert 'diptych_router_attempts_total{policy="pair_cost",workers="1"} 1.0' in text
    assert "diptych_router_ttft_ratio_count 1.0" in text
