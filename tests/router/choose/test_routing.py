from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from diptych.common.errors import InvalidRequest
from diptych.router.values.request import Routing, routing_of
from diptych.v1 import inference_pb2, inference_pb2_grpc


def test_headers_choose_a_policy_a_session_and_a_goal() -> None:
    headers = {"x-diptych-policy": "round_robin", "x-diptych-session": "s", "x-diptych-ttft-deadline-ms": "250"}
    assert routing_of(headers) == Routing("round_robin", "s", 0.25)
    assert routing_of({"content-type": "application/json"}) == Routing()
    assert routing_of({"x-diptych-ttft-slo-ms": "250"}) == Routing(ttft_deadline_s=0.25)  # its former name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x-diptych-policy", "best", "there is no policy 'best': use one of "),
        ("x-diptych-session", "s" * 257, "at most 256 characters"),
        ("x-diptych-ttft-deadline-ms", "soon", "positive number of milliseconds, not 'soon'"),
        ("x-diptych-ttft-deadline-ms", "nan", "positive number"),
        ("x-diptych-ttft-deadline-ms", "-1", "positive number"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_with_words(name: str, value: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        routing_of({name: value})
    assert caught.value.param == name


def test_a_request_may_choose_its_policy_over_http_and_grpc(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster(prefill=2, policy="least_load")
    cluster.prefill(0).instance.load.waiting_tokens = 1000
    cluster.report_load(cluster.prefill(0), cluster.prefill(0).instance.load)
    headers = {"x-diptych-policy": "round_robin"}
    for _ in range(4):
        assert cluster.post("/v1/completions", {"prompt": "p"}, headers)[0] == 200
    assert [len(cluster.prefill(index).started) for index in (0, 1)] == [2, 2]
    status, answer = cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-policy": "best"})
    assert (status, answer["error"]["param"]) == (400, "x-diptych-policy")
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        ask = inference_pb2_grpc.InferenceStub(channel).Generate
        with pytest.raises(grpc.RpcError) as refused:
            ask(inference_pb2.GenerateRequest(text="p"), metadata=(("x-diptych-policy", "best"),))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
