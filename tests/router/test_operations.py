"""What operators see and do: health, metrics, request ids, timings, limits, stopping."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from diptych.common.config import parse
from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.v1 import worker_pb2

Cluster = Any


def metric(cluster: Cluster, line: str) -> float:
    """The value of the metric whose line begins with `line`; 0 if there is none."""
    lines = [found for found in cluster.get("/metrics")[1].splitlines() if found.startswith(line + " ")]
    return float(lines[0].split()[-1]) if lines else 0.0


def test_health_needs_no_worker_and_readiness_does(start_cluster: Any) -> None:
    cluster = start_cluster(0, 0)
    assert cluster.get("/health") == (200, '{"status":"ok"}')
    status, body = cluster.get("/ready")
    assert (status, json.loads(body)["ready"]) == (503, False)


def test_what_was_served_is_counted(cluster: Cluster, fail: Any) -> None:
    cluster.complete("abcde")
    cluster.decode().faults = [fail(2, worker_pb2.ERROR_CODE_RETRACTED)]
    cluster.complete("abcde")
    cluster.post("/v1/completions", {"prompt": 1})
    assert {
        "ok": metric(cluster, 'diptych_router_requests_total{api="completions",outcome="ok"}'),
        "invalid": metric(cluster, 'diptych_router_requests_total{api="completions",outcome="invalid"}'),
        "prompt": metric(cluster, "diptych_router_prompt_tokens_total"),
        "cached": metric(cluster, "diptych_router_cached_tokens_total"),
        "output": metric(cluster, "diptych_router_output_tokens_total"),
        "retries": metric(cluster, 'diptych_router_retries_total{reason="retracted"}'),
        "replays": metric(cluster, "diptych_router_replays_total"),
        "ttft": metric(cluster, "diptych_router_ttft_seconds_count"),
        "e2e": metric(cluster, "diptych_router_e2e_seconds_count"),
        "within an hour": metric(cluster, 'diptych_router_e2e_seconds_bucket{le="3600.0"}'),
        "select": metric(cluster, 'diptych_router_stage_seconds_count{stage="select"}'),
        "join": metric(cluster, 'diptych_router_stage_seconds_count{stage="decode_join"}'),
        "legs": metric(cluster, 'diptych_router_legs_open{role="decode"}'),
    } == {
        "ok": 2,
        "invalid": 1,
        "prompt": 10,
        "cached": 6,
        "output": 14,
        "retries": 1,
        "replays": 1,
        "ttft": 2,
        "e2e": 2,
        "within an hour": 2,
        "select": 3,
        "join": 2,
        "legs": 0,
    }


def test_every_stage_of_a_request_is_timed(cluster: Cluster) -> None:
    cluster.complete("abcde")
    stages = ("admit", "prepare", "select", "dispatch", "first_token", "respond", "prefill_queue", "decode_join")
    lines = [f'diptych_router_stage_seconds_count{{stage="{stage}"}}' for stage in stages]
    assert [metric(cluster, line) for line in lines] == [1] * len(stages)


@pytest.mark.parametrize(("given", "is_kept"), [("my-id.1", True), ("with space", False), ("x" * 200, False)])
def test_a_usable_request_id_is_kept_everywhere(cluster: Cluster, given: str, is_kept: bool) -> None:
    with cluster.ask(headers={"x-request-id": given}) as answer:
        seen = answer.headers["x-request-id"]
    assert (seen == given) is is_kept
    assert cluster.prefill().started[0].request_id == seen != ""


def test_an_error_carries_the_request_id_too(cluster: Cluster) -> None:
    with cluster.ask(headers={"x-request-id": "mine"}, prompt=1) as answer:
        assert (answer.status, answer.headers["x-request-id"]) == (400, "mine")


def test_timings_come_when_asked_for(cluster: Cluster) -> None:
    _, plain = cluster.post("/v1/completions", {"prompt": "p"})
    _, timed = cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-timings": "1"})
    assert "diptych" not in plain
    seen = timed["diptych"]
    assert seen["room"] == f"{cluster.decode().started[1].room:016x}"
    assert (seen["prefill_instance"], seen["decode_instance"]) == (f"{100:016x}", f"{101:016x}")
    assert (seen["pages_moved"], seen["prefill_pages_moved"], seen["bytes_moved"]) == (2, 2, 512)
    assert seen["prefill_kv_digest"] == seen["decode_kv_digest"] == f"{9:016x}"
    assert seen["whole"]


def test_timings_come_with_the_last_chunk_of_a_stream(cluster: Cluster) -> None:
    with cluster.ask(headers={"x-diptych-timings": "1"}, stream=True) as answer:
        events = [json.loads(line[6:]) for line in answer.read().splitlines() if line.startswith(b"data: {")]
    assert ["diptych" in event for event in events] == [False] * (len(events) - 1) + [True]


def test_timings_do_not_wait_long_for_a_prefill_leg_that_hangs(
    cluster: Cluster, hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.serve.pipeline.REPORT_WAIT_S", 0.2)
    cluster.prefill().faults = [hang(1)]
    _, answer = cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-timings": "1"})
    seen = answer["diptych"]
    assert (answer["choices"][0]["text"], seen["prefill_pages_moved"]) == ("Hello!", 2)
    assert (seen["whole"], seen["decode_kv_digest"]) == (False, f"{9:016x}")
    assert {"prefill_kv_digest", "prefill_transfer_us", "prefill_added_ttft_us"}.isdisjoint(seen)


def test_timings_wait_for_the_last_word_of_a_slow_prefill_leg(cluster: Cluster, hang: Any) -> None:
    cluster.prefill().faults = [hang(1)]
    connection = cluster.connect(headers={"x-diptych-timings": "1"})
    cluster.wait_for(lambda: cluster.decode().started and not cluster.decode().running)
    assert cluster.prefill().running
    cluster.release(cluster.prefill())
    seen = json.load(connection.getresponse())["diptych"]
    connection.close()
    assert seen["whole"]
    assert seen["prefill_kv_digest"] == seen["decode_kv_digest"] == f"{9:016x}"


def test_timings_of_an_output_that_a_stop_string_cut_short_are_not_whole(cluster: Cluster, hang: Any) -> None:
    cluster.decode().faults = [hang(3)]
    body = {"prompt": "p", "stop": "ll"}
    _, answer = cluster.post("/v1/completions", body, {"x-diptych-timings": "1"})
    seen = answer["diptych"]
    assert (answer["choices"][0]["text"], seen["whole"]) == ("He", False)
    assert {"pages_moved", "decode_kv_digest", "decode_join_us"}.isdisjoint(seen)


def test_token_ids_come_when_asked_for(cluster: Cluster) -> None:
    wanted = [*cluster.tokenizer.encode("Hello!"), 256]
    assert cluster.complete("p", return_token_ids=True)["token_ids"] == wanted
    with cluster.ask(stream=True, return_token_ids=True) as answer:
        events = [json.loads(line[6:]) for line in answer.read().splitlines() if line.startswith(b"data: {")]
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == wanted


def test_more_requests_than_the_limit_are_refused_at_once(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(max_concurrent=2, max_queued=0)
    cluster.decode().faults = [hang(1), hang(1)]
    waiting = [cluster.connect(), cluster.connect()]
    cluster.wait_for(lambda: len(cluster.decode().started) == 2)
    with cluster.ask() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert json.load(answer)["error"]["code"] == "rate_limit_exceeded"
    cluster.release(cluster.decode())
    for connection in waiting:
        assert connection.getresponse().read()
        connection.close()
    assert cluster.complete("p")["text"] == "Hello!"


def test_requests_of_one_moment_travel_in_one_message(cluster: Cluster) -> None:
    cluster.complete("p", n=8)
    assert cluster.decode().batch_sizes[0] == (8, 0)


def test_a_stopping_router_lets_a_stream_finish(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(drain_s=200.0)
    cluster.decode().faults = [hang(2)]
    with cluster.ask(stream=True) as answer:
        cluster.stop_router()
        cluster.wait_until(lambda: not cluster.accepts_connections())
        cluster.release(cluster.decode())
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_stopping_router_tells_what_it_cannot_finish(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(drain_s=0.1)
    cluster.prefill().faults, cluster.decode().faults = [hang(1)], [hang(2)]
    with cluster.ask(stream=True) as answer:
        cluster.stop_router()
        *_, last = [line for line in answer.read().splitlines() if line]
    assert json.loads(last[6:])["error"]["message"] == "the router is stopping"
    cluster.wait_for(lambda: not any(worker.running for worker in cluster.workers))


def test_many_clients_at_once_get_their_own_answers(start_cluster: Any) -> None:
    cluster = start_cluster(2, 2)
    cluster.script = None
    wanted = {seed: cluster.complete("p", seed=seed, max_tokens=30)["text"] for seed in range(16)}
    got: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda s=seed: got.update({s: cluster.complete("p", seed=s, max_tokens=30)["text"]}))
        for seed in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == wanted


@pytest.mark.integration
def test_the_router_needs_no_torch() -> None:
    code = "import sys, diptych.router.main; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_taken_port_is_said_so(start_cluster: Any) -> None:
    taken = start_cluster(0, 0)
    port = int(taken.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
        start_cluster(0, 0, http_port=port)


def test_flags_are_checked() -> None:
    config = parse(RouterConfig, ["--bootstrap", "a:1,b:2", "--policy", "round_robin"], prog="router")
    assert (config.bootstrap, config.policy) == (("a:1", "b:2"), "round_robin")
    with pytest.raises(ConfigError, match="--max-concurrent must be positive"):
        RouterConfig(max_concurrent=0).validate()
    with pytest.raises(ConfigError, match="--bootstrap"):
        RouterConfig(bootstrap=()).validate()


def test_metrics_are_not_at_the_api_s_port_unless_they_are_opened_there(start_cluster: Any) -> None:
    status, body = start_cluster(open_metrics=False).get("/metrics")
    assert status == 404
    assert "metrics are at the health port (--health-port)" in json.loads(body)["error"]["message"]
    assert "diptych_" not in body
