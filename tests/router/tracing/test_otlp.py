"""A real router that exports to a real collector, both in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import otlp_collector
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from otlp_collector import Collector, values

from diptych.router.tracing.otlp import OtlpExport
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
STATS = worker_pb2.LegStats(queue_us=1000, compute_us=2000, transfer_us=3000, join_us=4000, cached_tokens=3)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with otlp_collector.collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
        yield collector


@pytest.fixture
def cluster(collector: Collector, start_cluster: Callable[..., Any]) -> Any:
    cluster = start_cluster(open_export=OtlpExport)
    for worker in cluster.workers:
        worker.stats = STATS
    return cluster


def complete(cluster: Any, **headers: str) -> None:
    assert cluster.post("/v1/completions", {"prompt": "abc", "max_tokens": 4}, headers)[0] == 200


def test_a_request_continues_its_clients_trace_and_says_where_it_was_served(cluster: Any, collector: Collector) -> None:
    complete(cluster, **PARENT, **{"x-request-id": "mine"})
    (call,) = collector.calls(1)
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert call.name == "POST /v1/completions"
    assert values(call.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "diptych",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "diptych.request_id": "mine",
        "diptych.attempts": 1,
        "diptych.outcome": "ok",
    }
    attempt = collector.children(collector.children(call)["generate"])["attempt"]
    found = values(attempt.attributes)
    assert found["diptych.prefill_instance"] == f"{cluster.prefill().instance.instance_id:016x}"
    assert found["diptych.decode_instance"] == f"{cluster.decode().instance.instance_id:016x}"
    assert [event.name for event in attempt.events] == ["first_token"]


def test_its_stages_are_there_those_of_workers_too(cluster: Any, collector: Collector) -> None:
    complete(cluster)
    cluster.stop_router()
    (call,) = collector.calls(1)
    stages = collector.children(call)
    assert set(stages) == {"admit", "prepare", "generate"}
    assert set(collector.children(stages["generate"])) == {"select", "attempt"}
    legs = collector.children(collector.children(stages["generate"])["attempt"])
    stages_of = {name: collector.children(leg) for name, leg in legs.items()}
    assert {name: set(stages) for name, stages in stages_of.items()} == {
        "prefill": {"prefill_queue", "prefill_compute", "prefill_transfer"},
        "decode": {"decode_queue", "decode_transfer", "decode_join"},
    }
    compute = stages_of["prefill"]["prefill_compute"]
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == pytest.approx(2e6, abs=2)
    assert call.start_time_unix_nano < legs["decode"].start_time_unix_nano < call.end_time_unix_nano


def test_a_grpc_call_is_traced_likewise(cluster: Any, collector: Collector) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="abc")
        list(stub.GenerateStream(request, metadata=list(PARENT.items())))
        with pytest.raises(grpc.RpcError):
            stub.Generate(inference_pb2.GenerateRequest(text="abc", model="other"))
    cluster.stop_router()
    stream, whole = collector.calls(2)
    assert (stream.trace_id.hex(), stream.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert stream.name == values(stream.attributes)["rpc.method"] == "diptych.v1.Inference/GenerateStream"
    assert values(stream.attributes)["rpc.response.status_code"] == "OK"
    found = values(whole.attributes)
    assert (found["rpc.response.status_code"], found["diptych.outcome"]) == ("NOT_FOUND", "not_found")
    assert whole.parent_span_id == b""


def test_a_request_that_is_tried_again_shows_both_attempts(
    collector: Collector, start_cluster: Callable[..., Any], fail: Callable[..., Any]
) -> None:
    cluster = start_cluster(decode=2, policy="round_robin", open_export=OtlpExport)
    cluster.decode(0).faults = [fail(0, worker_pb2.ERROR_CODE_RETRACTED)]
    complete(cluster)
    cluster.stop_router()
    (call,) = collector.calls(1)
    assert values(call.attributes)["diptych.attempts"] == 2
    attempts = [span for span in collector.spans if span.name == "attempt"]
    assert [span.status.code for span in attempts] == [Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]
    assert values(attempts[0].attributes)["diptych.outcome"].startswith("failed: decode leg: RETRACTED")


def test_a_request_that_is_refused_is_a_call_without_an_output(cluster: Any, collector: Collector) -> None:
    assert cluster.post("/v1/completions", b"{")[0] == 400
    assert cluster.post("/v1/completions", {"prompt": "p", "model": "other"})[0] == 404
    cluster.stop_router()
    found = [values(call.attributes) for call in collector.calls(2)]
    assert [(each["http.response.status_code"], each["error.type"]) for each in found] == [
        (400, "invalid"),
        (404, "not_found"),
    ]


def test_a_client_that_leaves_is_an_outcome(cluster: Any, collector: Collector, hang: Callable[..., Any]) -> None:
    cluster.decode().faults = [hang(2)]
    with cluster.ask(stream=True, headers=PARENT):
        pass
    (call,) = collector.calls(1)
    assert values(call.attributes)["diptych.outcome"] == "disconnected"
    attempt = collector.children(collector.children(call)["generate"])["attempt"]
    assert values(attempt.attributes)["diptych.outcome"] == "closed"


def test_what_the_client_does_not_sample_is_not_sampled(cluster: Any, collector: Collector) -> None:
    complete(cluster, **UNSAMPLED)
    complete(cluster)
    cluster.stop_router()
    (call,) = collector.calls(1)
    assert call.parent_span_id == b""


def test_a_router_that_ends_sends_what_it_has_and_who_it_is(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, start_cluster: Callable[..., Any]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    cluster = start_cluster(open_export=OtlpExport, pod_name="router-0")
    complete(cluster)
    cluster.stop_router()
    assert len(collector.calls(1)) == 1
    resource = collector.resource
    assert (resource["service.name"], resource["k8s.pod.name"]) == ("diptych-router", "router-0")
    assert resource["service.instance.id"] == f"{cluster.router.fleet.router_id:016x}"
    assert resource["deployment.environment.name"] == "test"


def test_the_environment_has_the_last_word_on_the_name(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, start_cluster: Callable[..., Any]
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    cluster = start_cluster(open_export=OtlpExport)
    complete(cluster)
    cluster.stop_router()
    collector.calls(1)
    assert collector.resource["service.name"] == "front"


def test_a_collector_that_never_answers_holds_up_neither_requests_nor_the_end(
    cluster: Any, collector: Collector
) -> None:
    collector.may_answer.clear()
    complete(cluster)
    assert collector.asked.wait(otlp_collector.TIMEOUT_S)
    for _ in range(20):
        complete(cluster)
    cluster.stop_router()
    cluster.wait_until(cluster._running.done)
    assert collector.spans == []


@pytest.mark.parametrize("model", [b"\\ud800", b"x" * (5 << 20)], ids=["no Unicode", "longer than a message may be"])
def test_nothing_that_a_client_says_costs_other_requests_their_traces(
    cluster: Any, collector: Collector, model: bytes
) -> None:
    """What can't be encoded, or sent, would take everything with it that is sent in one message."""
    body = b'{"prompt": "p", "model": "' + model + b'"}'
    status, _ = cluster.post("/v1/completions", body, {"x-request-id": "odd"})
    complete(cluster, **{"x-request-id": "plain"})
    cluster.stop_router()
    found = {values(call.attributes)["diptych.request_id"]: values(call.attributes) for call in collector.calls(2)}
    assert found["odd"]["http.response.status_code"] == status
    assert found["plain"]["diptych.outcome"] == "ok"


def test_a_number_beyond_those_of_traces_is_told_as_the_largest(cluster: Any, collector: Collector) -> None:
    assert cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 2**64 - 1})[0] == 200
    cluster.stop_router()
    (call,) = collector.calls(1)
    assert values(call.attributes)["gen_ai.request.max_tokens"] == 2**63 - 1
