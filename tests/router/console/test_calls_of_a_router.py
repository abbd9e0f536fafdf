"""Calls of a real router with simulated workers, as the console shows them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.architectures.pooling import Pooling
from diptych.router.console.calls.calls import Calls
from diptych.router.console.calls.request_rows import RowFilter
from diptych.router.console.pieces import at_once
from diptych.router.console.state import Bar, RequestRow, RequestStory
from diptych.router.keys.keyring import digest_of
from diptych.router.tracing import tracer
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from diptych.v1.worker_pb2 import LegStats

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
STATS = LegStats(queue_us=100, compute_us=200, transfer_us=300, verify_us=50, join_us=60)


@pytest.fixture
def cluster(start_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Somebody looks at its calls, and however many come at once, all are followed."""
    monkeypatch.setattr(tracer, "MAX_IN_WINDOW", 1 << 30)
    cluster = start_cluster(prefill=2, decode=2)
    look(cluster)
    return cluster


def look(cluster: Any) -> None:
    cluster.router.console.calls.want(time.monotonic())


def chat(cluster: Any, request_id: str, headers: Any = None, **fields: Any) -> None:
    status, answer = cluster.post(
        "/v1/chat/completions", {**CHAT, **fields}, {"x-request-id": request_id, **(headers or {})}
    )
    assert status == 200, answer


def rows(cluster: Any, **fields: Any) -> dict[str, RequestRow]:
    calls: Calls = cluster.router.console.calls

    async def asked() -> dict[str, RequestRow]:
        return at_once(calls.requests(RowFilter(**fields)))["rows"]

    found: dict[str, RequestRow] = cluster.call(asked())
    return found


def story(cluster: Any, request_id: str) -> RequestStory:
    async def asked() -> RequestStory | None:
        calls: Calls = cluster.router.console.calls
        return at_once(calls.story(request_id))

    found = cluster.call(asked())
    assert found is not None
    return found  # type: ignore[no-any-return]


def ended(cluster: Any, request_id: str) -> RequestStory:
    """The story of a call once it has ended: that may be after its client has heard its last byte."""
    cluster.wait_until(lambda: rows(cluster).get(request_id, {"phase": ""})["phase"] == "ended")
    return story(cluster, request_id)


def names(bars: list[Bar]) -> list[str]:
    return [bar["name"] for bar in bars]


def check_sums(told: RequestStory) -> None:
    """Bars follow each other without a gap, and so do the parts of an attempt; together they are the call."""
    duration_s = told["row"]["duration_s"]
    total_s = sum(bar["duration_s"] for bar in told["bars"])
    assert total_s + told["unnamed_s"] == pytest.approx(duration_s, abs=1e-6)
    assert total_s >= 0.97 * duration_s
    at_s = 0.0
    for bar in told["bars"]:
        assert bar["begun_s"] == pytest.approx(at_s, abs=1e-6)
        at_s += bar["duration_s"]
        if bar["name"] in ("attempt", "retry", "replay", "hedge"):
            assert sum(part["duration_s"] for part in bar["parts"]) == pytest.approx(bar["duration_s"], abs=1e-6)


def test_a_call_that_nobody_follows_is_listed_by_how_it_was_routed(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster()
    chat(cluster, "unseen")
    told = ended(cluster, "unseen")
    assert cluster.router.serving.tracer.calls() == []
    assert told["row"]["outcome"] == "ok"
    assert (told["row"]["path"], told["row"]["num_attempts"]) == ("", 1)
    assert told["row"]["ttft_s"] is not None
    assert names(told["bars"]) == ["attempt"]
    assert told["unnamed_s"] > 0  # what came before nobody noted
    assert told["explanation"] is not None
    assert told["token_s"] == []


def test_a_call_that_is_followed_tells_all_its_stages(cluster: Any) -> None:
    for worker in cluster.workers:
        worker.stats = STATS
    chat(cluster, "seen", {"x-tenant": "acme"})
    told = ended(cluster, "seen")
    row = told["row"]
    assert (row["tenant"], row["path"], row["model"]) == ("acme", "/v1/chat/completions", "tiny")
    assert (row["status"], row["outcome"], row["output_tokens"]) == (200, "ok", 6)
    before = ["read", "parse", "check", "admit", "prepare", "gate", "select"]
    assert names(told["bars"]) == [*before, "attempt", "answer"]
    attempt = told["bars"][-2]
    assert names(attempt["parts"])[:2] == ["prefill_queue", "prefill_compute"]
    assert names(attempt["parts"])[-1] == "output"
    assert names(told["bars"][4]["parts"]) == ["render", "tokenize"]
    assert len(told["token_s"]) == 6
    check_sums(told)


@pytest.mark.parametrize("stream", [False, True])
def test_the_bars_of_many_calls_are_their_whole_time(cluster: Any, stream: bool) -> None:
    for number in range(8):
        with cluster.ask(stream=stream, headers={"x-request-id": f"{number}"}) as answer:
            answer.read()
    for number in range(8):
        check_sums(ended(cluster, f"{number}"))


def test_outputs_of_one_call_lie_beside_each_other(cluster: Any) -> None:
    chat(cluster, "two", n=2)
    told = ended(cluster, "two")
    check_sums(told)
    assert names(told["bars"])[-2:] == ["generate", "answer"]
    assert names(told["bars"][-2]["parts"]) == ["output", "output"]
    assert told["row"]["output_tokens"] == 12


def test_a_call_that_is_tried_again_shows_both_attempts_one_after_the_other(cluster: Any, fail: Any) -> None:
    for decode in (cluster.decode(0), cluster.decode(1)):
        decode.faults = [fail(2, worker_pb2.ERROR_CODE_RETRACTED)]
    chat(cluster, "again")
    told = ended(cluster, "again")
    check_sums(told)
    tried = [bar for bar in told["bars"] if bar["name"] in ("attempt", "replay")]
    assert tried[0]["is_failure"]
    assert not tried[-1]["is_failure"]
    assert len(tried) == told["row"]["num_attempts"] >= 2
    assert len(told["token_s"]) == 6


def test_a_call_whose_worker_was_killed_shows_what_came_then(cluster: Any, hang: Any) -> None:
    for decode in (cluster.decode(0), cluster.decode(1)):
        decode.faults = [hang(2)]
    connection = cluster.connect(stream=True, headers={"x-request-id": "killed"})
    cluster.wait_until(lambda: rows(cluster, phase="output"))
    first = next(w for w in cluster.workers if f"{w.instance.instance_id:016x}" == rows(cluster)["killed"]["decode"])
    for other in (cluster.decode(0), cluster.decode(1)):
        if other is not first:
            other.faults = []
    cluster.stop_worker(first)
    with connection.getresponse() as answer:
        answer.read()
    connection.close()
    told = ended(cluster, "killed")
    check_sums(told)
    assert "replay" in names(told["bars"])


def test_a_grpc_call_is_told_likewise(cluster: Any) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        list(stub.GenerateStream(inference_pb2.GenerateRequest(text="abc", request_id="rpc")))
        with pytest.raises(grpc.RpcError):
            stub.Generate(inference_pb2.GenerateRequest(text="abc", model="other", request_id="wrong"))
    told = ended(cluster, "rpc")
    check_sums(told)
    assert (told["row"]["path"], told["row"]["status"]) == ("diptych.v1.Inference/GenerateStream", 0)
    assert ended(cluster, "wrong")["row"]["status"] == 5


def test_a_call_that_runs_is_listed_with_how_far_it_is(cluster: Any, hang: Any) -> None:
    for decode in (cluster.decode(0), cluster.decode(1)):
        decode.faults = [hang(1)]
    connection = cluster.connect(stream=True, headers={"x-request-id": "runs"})
    cluster.wait_until(lambda: rows(cluster, phase="output"))
    row = rows(cluster)["runs"]
    assert (row["outcome"], row["status"]) == ("", 200)
    assert row["duration_s"] > 0
    told = story(cluster, "runs")
    assert names(told["bars"])[-1] == "attempt"
    connection.close()
    assert ended(cluster, "runs")["row"]["outcome"] == "disconnected"


def test_rows_are_chosen_by_what_is_asked_for(cluster: Any) -> None:
    chat(cluster, "a", {"x-tenant": "one"})
    chat(cluster, "b", {"x-tenant": "two"})
    assert cluster.post("/v1/chat/completions", b"{", {"x-request-id": "bad"})[0] == 400
    for request_id in ("a", "b", "bad"):
        ended(cluster, request_id)
    assert rows(cluster, tenant="one").keys() == {"a"}
    assert rows(cluster, outcome="invalid").keys() == {"bad"}
    assert rows(cluster, slow_s=60.0) == {}
    assert list(rows(cluster)) == ["bad", "b", "a"]
    assert list(rows(cluster, limit=1)) == ["bad"]


def test_what_is_refused_before_it_is_understood_has_a_story_too(cluster: Any) -> None:
    assert cluster.post("/v1/chat/completions", b"{", {"x-request-id": "bad"})[0] == 400
    told = ended(cluster, "bad")
    check_sums(told)
    assert names(told["bars"])[0] == "read"
    assert (told["row"]["status"], told["explanation"]) == (400, None)


def test_a_tenant_is_whose_key_the_call_carries(start_cluster: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\nsha256 = "{digest_of("a-key").hex()}"\n')
    cluster = start_cluster(api_keys_file=keys)
    look(cluster)
    headers = {"authorization": "Bearer a-key", "x-tenant": "bob"}
    chat(cluster, "hers", headers)
    assert cluster.post("/v1/chat/completions", b"{", {**headers, "x-request-id": "bad"})[0] == 400
    assert ended(cluster, "hers")["row"]["tenant"] == "alice"
    assert ended(cluster, "bad")["row"]["tenant"] == "alice"


def test_a_prompt_that_a_worker_tokenises_is_counted_when_it_has_said_so(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster(tokenize_at="worker")
    look(cluster)
    chat(cluster, "text")
    told = ended(cluster, "text")
    check_sums(told)
    assert told["row"]["prompt_tokens"] == len(cluster.tokenizer.encode("<user>hello\n"))
    assert "messages" in names(told["bars"][-2]["parts"])


def test_a_call_that_is_refused_in_line_says_so(start_cluster: Callable[..., Any], hang: Any) -> None:
    cluster = start_cluster(max_concurrent=1, max_queued=0)
    look(cluster)
    cluster.decode().faults = [hang(1)]
    connection = cluster.connect(stream=True, headers={"x-request-id": "first"})
    cluster.wait_until(lambda: rows(cluster, phase="output"))
    assert cluster.post("/v1/chat/completions", CHAT, {"x-request-id": "refused"})[0] == 429
    told = ended(cluster, "refused")
    check_sums(told)
    assert names(told["bars"]) == ["read", "parse", "check", "admit", "answer"]
    assert (told["row"]["outcome"], told["row"]["status"]) == ("overloaded", 429)
    connection.close()
    cluster.wait_until(lambda: rows(cluster)["first"]["phase"] == "ended")


def test_a_call_without_a_pair_has_waited_for_one(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster()
    look(cluster)
    cluster.publish()
    assert cluster.post("/v1/chat/completions", CHAT, {"x-request-id": "alone"})[0] == 503
    told = ended(cluster, "alone")
    check_sums(told)
    assert names(told["bars"])[-2:] == ["select", "answer"]
    assert told["row"]["outcome"] == "unavailable"


def test_a_client_that_does_not_read_shows_as_a_write(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster(client_stall_s=0.5)
    look(cluster)
    cluster.script = "x" * 2000
    body = json.dumps({"prompt": "p", "max_tokens": 1500, "stream": True, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: slow\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", cluster.router.http.port))
        connection.sendall(head.encode() + body)
        told = ended(cluster, "slow")
    check_sums(told)
    assert told["row"]["outcome"] == "disconnected"
    written = [part for bar in told["bars"] for part in (bar, *bar["parts"]) if part["name"] == "write"]
    assert max(part["duration_s"] for part in written) > 0.4


def test_a_second_attempt_that_wins_is_told_with_the_first(start_cluster: Callable[..., Any], hang: Any) -> None:
    cluster = start_cluster(prefill=2, decode=2, policy="round_robin", hedge_after_s=0.05)
    look(cluster)
    cluster.prefill(0).faults = [hang(0)]
    chat(cluster, "raced")
    told = ended(cluster, "raced")
    check_sums(told)
    assert told["row"]["num_attempts"] == 2
    assert names(told["bars"])[-5:] == ["select", "attempt", "select", "hedge", "answer"]


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_call_for_vectors_shows_where_the_time_of_its_prompts_went(
    start_cluster: Callable[..., Any], way: str
) -> None:
    cluster = start_cluster(decode=0, pooling=Pooling("embed", "last", normalize=True))
    look(cluster)
    if way == "http":
        body = {"input": ["hello", "you"]}
        assert cluster.post("/v1/embeddings", body, {"x-request-id": "vectors"})[0] == 200
    else:
        options = inference_pb2.VectorOptions(request_id="vectors")
        with grpc.insecure_channel(cluster.grpc_target) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            stub.Embed(inference_pb2.EmbedRequest(texts=["hello", "you"], options=options))
    told = ended(cluster, "vectors")
    check_sums(told)
    row = told["row"]
    assert (row["outcome"], row["path"].endswith({"http": "/v1/embeddings", "grpc": "/Embed"}[way])) == ("ok", True)
    assert (row["prompt_tokens"], row["output_tokens"], row["num_attempts"]) == (8, 0, 2)
    assert row["prefill"] == row["decode"], "one worker does all of it"
    assert names(told["bars"])[-2:] == ["generate", "answer"]
    for output in told["bars"][-2]["parts"]:
        (attempt,) = [bar for bar in output["parts"] if bar["name"] == "attempt"]
        assert names(attempt["parts"])[0] == "prefill_queue", "as the worker told it"
    assert len(told["explanation"]["requests"]) == 2  # type: ignore[index]
