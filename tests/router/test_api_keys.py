"""API keys, as the official client and a gRPC client meet them."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.router.keys.keyring import digest_of
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

Cluster = Any
CHAT: list[Any] = [{"role": "user", "content": "hi"}]


def entry(name: str, key: str, **settings: int | str) -> str:
    lines = [f"[{name}]", f'sha256 = "{digest_of(key).hex()}"', *(f"{k} = {v}" for k, v in settings.items())]
    return "\n".join([*lines, ""])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(
        entry("alice", "a-key", max_concurrent=1, max_priority=9)
        + entry("bob", "b-key", requests_per_minute=2, tokens_per_minute=1000)
        + entry("ops", "o-key", admin="true")
    )
    return path


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster], keys: Path) -> Cluster:
    return start_cluster(api_keys_file=keys, runtime_lora=True)


def client(cluster: Cluster, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def metric(cluster: Cluster, line: str) -> float:
    lines = [found for found in cluster.get("/metrics")[1].splitlines() if found.startswith(line + " ")]
    return float(lines[0].split()[-1]) if lines else 0.0


def test_anthropics_clients_have_a_header_of_their_own_for_the_key(cluster: Cluster) -> None:
    hello: Any = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    with anthropic.Anthropic(base_url=cluster.url, api_key="b-key", max_retries=0) as known:
        assert known.messages.create(**hello).stop_reason == "max_tokens"
    with (
        anthropic.Anthropic(base_url=cluster.url, api_key="wrong", max_retries=0) as unknown,
        pytest.raises(anthropic.AuthenticationError) as refusal,
    ):
        unknown.messages.create(**hello)
    assert refusal.value.type == "authentication_error"


def test_what_the_api_can_do_is_told_without_a_key_and_what_the_router_sees_is_not(cluster: Cluster) -> None:
    assert cluster.get("/openapi.json")[0] == 200
    assert [cluster.get(path)[0] for path in ("/admin/workers", "/tokenize", "/generate")] == [401] * 3


@pytest.mark.parametrize(("key", "status"), [("o-key", 200), ("a-key", 403)])
def test_without_a_token_an_admins_key_opens_what_operators_see(cluster: Cluster, key: str, status: int) -> None:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("GET", "/admin/workers", headers=bearer(key))
    assert connection.getresponse().status == status
    connection.close()


def test_a_known_key_is_served_and_its_use_is_counted_by_name(cluster: Cluster) -> None:
    with client(cluster, "b-key") as known:
        answer = known.chat.completions.create(model="tiny", messages=CHAT)
        assert answer.choices[0].message.content == "Hello!"
        chunks = list(known.completions.create(model="tiny", prompt="abc", stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello!"
    assert answer.usage is not None
    cluster.wait_until(lambda: metric(cluster, 'diptych_router_key_output_tokens_total{key="bob"}') == 14)
    assert metric(cluster, 'diptych_router_key_prompt_tokens_total{key="bob"}') == answer.usage.prompt_tokens + 3
    assert metric(cluster, 'diptych_router_key_calls_total{key="bob"}') == 2
    assert cluster.decode().started[0].tenant == "bob"


def test_a_key_takes_no_other_tenants_share(cluster: Cluster) -> None:
    body = {"prompt": "p", "user": "alice"}
    assert cluster.post("/v1/completions", body, {**bearer("b-key"), "x-tenant": "alice"})[0] == 200
    request = inference_pb2.GenerateRequest(text="p", tenant="alice")
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=[("authorization", "Bearer b-key")])
    assert {leg.tenant for leg in cluster.decode().started} == {"bob"}


def test_an_unknown_key_is_an_authentication_error(cluster: Cluster) -> None:
    with client(cluster, "x-key") as unknown:
        with pytest.raises(openai.AuthenticationError) as caught:
            unknown.chat.completions.create(model="tiny", messages=CHAT)
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            unknown.models.list()
    assert metric(cluster, 'diptych_router_key_refusals_total{reason="wrong_key"}') == 2
    assert "x-key" not in cluster.get("/metrics")[1]


def test_without_a_key_only_probes_and_metrics_answer(cluster: Cluster) -> None:
    open_paths = ("/health", "/health/live", "/health/startup", "/health/ready", "/ready", "/metrics")
    cluster.wait_until(lambda: [cluster.get(path)[0] for path in open_paths] == [200] * len(open_paths))
    assert [cluster.get(path)[0] for path in ("/v1/models", "/nothing", "/metrics/")] == [401, 401, 401]
    status, answer = cluster.post("/v1/completions", {"prompt": "p"})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_a_long_body_without_a_key_is_refused_and_the_connection_goes_on(cluster: Cluster) -> None:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    for key, status in (("x-key", 401), ("o-key", 400)):
        connection.request("POST", "/v1/completions", b" " * 2_000_000, bearer(key))
        with connection.getresponse() as answer:
            assert (answer.status, len(answer.read()) > 0) == (status, True)
    connection.close()


def test_limits_are_429_and_say_when_to_come_back(cluster: Cluster, hang: Any) -> None:
    for _ in range(2):
        assert cluster.post("/v1/completions", {"prompt": "p"}, bearer("b-key"))[0] == 200
    with client(cluster, "b-key") as bob, pytest.raises(openai.RateLimitError) as caught:
        bob.completions.create(model="tiny", prompt="p", stream=True)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert "2 requests a minute" in caught.value.message
    cluster.decode().faults = [hang(1)]
    with cluster.ask(headers=bearer("a-key"), stream=True) as running:
        status, answer = cluster.post("/v1/completions", {"prompt": "p"}, bearer("a-key"))
        assert (status, "1 requests at once" in answer["error"]["message"]) == (429, True)
        cluster.release(cluster.decode())
        assert running.read().endswith(b"data: [DONE]\n\n")
    assert metric(cluster, 'diptych_router_key_limited_total{key="alice",limit="max_concurrent"}') == 1


def test_what_changes_the_platform_needs_an_admin_key(cluster: Cluster) -> None:
    body = {"lora_name": "x"}
    status, answer = cluster.post("/v1/unload_lora_adapter", body, bearer("b-key"))
    assert (status, answer["error"]["code"]) == (403, "insufficient_permissions")
    assert metric(cluster, 'diptych_router_key_refusals_total{reason="no_admin"}') == 1
    assert cluster.post("/v1/unload_lora_adapter", body, bearer("o-key"))[0] not in (401, 403)


def test_without_a_platform_token_draining_needs_an_admin_key(cluster: Cluster) -> None:
    headers: list[dict[str, str]] = [{}, bearer("b-key"), bearer("o-key")]
    assert [cluster.post("/admin/drain", b"", each)[0] for each in headers] == [401, 403, 202]


def replace(path: Path, text: str) -> None:
    """As an editor or Kubernetes does it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_request_whose_key_is_taken_away_finishes(cluster: Cluster, keys: Path, hang: Any) -> None:
    cluster.decode().faults = [hang(2)]
    with cluster.ask(headers=bearer("a-key"), stream=True) as running:
        replace(keys, entry("carol", "c-key"))
        assert cluster.post("/v1/completions", {"prompt": "p"}, bearer("a-key"))[0] == 401
        assert cluster.post("/v1/completions", {"prompt": "p"}, bearer("c-key"))[0] == 200
        cluster.release(cluster.decode())
        events = [json.loads(line[6:]) for line in running.read().splitlines() if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello!"


def test_a_file_that_makes_no_sense_changes_nothing(
    cluster: Cluster, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace(keys, "[alice")
    assert cluster.post("/v1/completions", {"prompt": "p"}, bearer("a-key"))[0] == 200
    assert "what was read before stays in use" in caplog.text


def test_grpc_asks_for_the_same_keys_and_its_health_does_not(cluster: Cluster) -> None:
    request = inference_pb2.GenerateRequest(text="p")
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, dict[str, str]]:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            error: Any = caught.value
            return error.code(), dict(error.trailing_metadata())

        wrong, bob = [("authorization", "Bearer x")], [("authorization", "Bearer b-key")]
        assert refusal(lambda: stub.Generate(request))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(lambda: stub.Generate(request, metadata=wrong))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(lambda: list(stub.GenerateStream(request)))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(lambda: stub.ListModels(inference_pb2.ListModelsRequest()))[0] is (
            grpc.StatusCode.UNAUTHENTICATED
        )
        assert stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bob).models
        assert [stub.Generate(request, metadata=bob).text for _ in range(2)] == ["Hello!", "Hello!"]
        code, metadata = refusal(lambda: list(stub.GenerateStream(request, metadata=bob)))
        assert (code, int(metadata["retry-after"]) > 0) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


def test_a_caller_over_its_limit_takes_nobodys_place_in_line_and_a_refusal_costs_no_call(
    start_cluster: Callable[..., Cluster], keys: Path, hang: Any
) -> None:
    cluster = start_cluster(api_keys_file=keys, max_concurrent=1, max_queued=1)
    cluster.decode().faults = [hang(1)]
    running = cluster.connect(headers=bearer("a-key"))
    cluster.wait_for(lambda: cluster.decode().started)
    waiting = cluster.connect(headers=bearer("o-key"))
    cluster.wait_until(lambda: cluster.router.serving.shared.admission.num_waiting == 1)
    refusals = []
    for key, priority in (("a-key", 9), ("b-key", 0), ("b-key", 0), ("b-key", 0)):
        status, answer = cluster.post("/v1/completions", {"prompt": "p", "priority": priority}, bearer(key))
        refusals.append((status, "limited to" in answer["error"]["message"]))
    assert refusals == [(429, True), *[(429, False)] * 3]
    cluster.release(cluster.decode())
    assert [connection.getresponse().status for connection in (running, waiting)] == [200, 200]
    running.close()
    waiting.close()


def test_a_prompt_that_is_refused_for_its_first_token_costs_nothing(
    start_cluster: Callable[..., Cluster], keys: Path
) -> None:
    cluster = start_cluster(api_keys_file=keys)
    cluster.prefill().stats = worker_pb2.LegStats(compute_us=20_000_000)
    for slo_ms, status in (("", 200), ("60000", 200), ("5000", 429)):
        headers = {**bearer("b-key" if status == 429 else "o-key"), "x-diptych-ttft-deadline-ms": slo_ms}
        assert cluster.post("/v1/completions", {"prompt": "p"}, headers)[0] == status
    assert metric(cluster, 'diptych_router_key_prompt_tokens_total{key="bob"}') == 0


HALF_SENT = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: 200000\r\n\r\n"
    + b'{"prompt":"'
    + b"x" * 150_000
)


def test_the_bodies_of_one_key_leave_memory_to_others(start_cluster: Callable[..., Cluster], keys: Path) -> None:
    """With bodies of 200,000 bytes at most a key may hold 3,200,000 of them: 21 of these, and no 22nd."""
    cluster = start_cluster(api_keys_file=keys, max_body_bytes=200_000)
    budget = cluster.router.serving.budget
    with ExitStack() as stack:
        for at in range(21):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", cluster.router.http.port), 200))
            connection.sendall(HALF_SENT % b"b-key")
            cluster.wait_until(lambda at=at: budget.num_bytes >= 140_000 * (at + 1))
        bob, ops = (stack.enter_context(client(cluster, key)) for key in ("b-key", "o-key"))
        with pytest.raises(openai.RateLimitError, match="'bob' would take more than 3200000 bytes") as refused:
            bob.completions.create(model="tiny", prompt="x" * 190_000, max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="too many"):  # which was read
            ops.completions.create(model="tiny", prompt="x" * 190_000, max_tokens=1)
        assert bob.completions.create(model="tiny", prompt="x", max_tokens=1).choices
    cluster.wait_until(lambda: budget.num_bytes == 0)
