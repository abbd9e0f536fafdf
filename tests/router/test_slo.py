"""SLOs from clients to workers, and who is refused so that others are served well."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.common.errors import ConfigError
from diptych.router.config import RENAMED, RouterConfig
from diptych.router.keys.keyring import digest_of
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

Cluster = Any
TIERS = ("chat:ttft_ms=300:tpot_ms=40:weight=4", "flex:weight=0.5:sheddable", "batch:weight=0.25:sheddable")
KEYS = {"anybody": "", "bulk": 'slo_tiers = ["batch", "flex"]'}
APIS: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 4},
    "/v1/responses": {"input": "p"},
    "/generate": {"text": "p"},
}
CHAT = worker_pb2.Slo(ttft_ms=250, tpot_ms=40, weight=4)
BATCH = worker_pb2.Slo(ttft_ms=5000, weight=0.25, sheddable=True)


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Callable[..., Cluster]) -> Cluster:
    return start_shared_cluster(slo_tiers=TIERS, ttft_slo_ms=5000.0)


def told(cluster: Cluster) -> worker_pb2.Slo:
    """Return what both legs of the last request were told."""
    prefill: worker_pb2.StartLeg = cluster.prefill().started[-1]
    decode: worker_pb2.StartLeg = cluster.decode().started[-1]
    assert prefill.slo == decode.slo
    return prefill.slo


@pytest.mark.parametrize("path", APIS)
def test_every_api_tells_both_workers_what_a_request_says(cluster: Cluster, path: str) -> None:
    asked = {"slo": {"tier": "chat", "ttft_ms": 250}}
    for body, headers, slo in (
        (asked, {}, CHAT),
        ({}, {"x-diptych-slo": "chat:ttft_ms=250"}, CHAT),
        (asked, {"x-diptych-slo": "batch:ttft_ms=5000"}, BATCH),
        ({}, {}, worker_pb2.Slo(ttft_ms=5000, weight=1)),
    ):
        status, answer = cluster.post(path, {**APIS[path], **body}, headers)
        assert status == 200, answer
        assert told(cluster) == slo


def test_so_does_grpc(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        asked = inference_pb2.GenerateRequest(text="p", slo=inference_pb2.SloWish(tier="chat", ttft_ms=250))
        generate(asked)
        assert told(cluster) == CHAT
        generate(asked, metadata=(("x-diptych-slo", "batch:ttft_ms=5000"),))
        assert told(cluster) == BATCH
        asked.slo.tier = "nobody"
        with pytest.raises(grpc.RpcError, match="use default or chat or flex or batch") as refused:
            generate(asked)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("slo", "param", "words"),
    [
        ({"tier": "gold"}, "slo.tier", "no SLO tier 'gold' for this request: use default or chat or flex or batch"),
        ({"ttft_ms": 0}, "slo.ttft_ms", "greater than 0"),
        ({"tpot_ms": "fast"}, "slo.tpot_ms", "number"),
        ({"weight": 9}, "slo.weight", "weight"),
        ("chat", "slo", "object"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(cluster: Cluster, slo: Any, param: str, words: str) -> None:
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "slo": slo})
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


def test_a_key_is_held_to_its_tiers(start_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[{name}]\nsha256 = "{digest_of(name).hex()}"\n{more}\n' for name, more in KEYS.items()))
    cluster = start_cluster(slo_tiers=TIERS, api_keys_file=keys)
    for name, slo, found in (
        ("anybody", {}, worker_pb2.Slo()),
        ("anybody", {"tier": "chat", "ttft_ms": 250}, CHAT),
        ("bulk", {}, worker_pb2.Slo(weight=0.25, sheddable=True)),
        ("bulk", {"tier": "flex"}, worker_pb2.Slo(weight=0.5, sheddable=True)),
    ):
        body = {"prompt": "p", "slo": slo}
        assert cluster.post("/v1/completions", body, {"authorization": f"Bearer {name}"})[0] == 200
        assert told(cluster) == found
    body = {"prompt": "p", "slo": {"tier": "chat"}}
    status, answer = cluster.post("/v1/completions", body, {"authorization": "Bearer bulk"})
    assert (status, answer["error"]["param"]) == (400, "slo.tier")
    assert "use flex or batch" in answer["error"]["message"]


def test_a_crowd_sheds_what_is_sheddable_and_metrics_tell_it_by_tier(
    start_cluster: Callable[..., Cluster], hang: Callable[[int], Any]
) -> None:
    cluster = start_cluster(slo_tiers=TIERS)
    cluster.prefill().stats = worker_pb2.LegStats(compute_us=1_000_000)
    assert cluster.post("/v1/completions", {"prompt": "p"})[0] == 200  # its worker's speed is known now
    cluster.decode().faults = [hang(1)]
    chat = cluster.connect(slo={"tier": "chat"})
    cluster.wait_for(lambda: cluster.decode().started[1:])
    load = cluster.prefill().instance.load
    load.waiting_tokens, load.num_waiting_prompts = 1000, 10
    cluster.report_load(cluster.prefill(), load)
    cluster.wait_until(lambda: cluster.router.dispatcher.selector.outlook().wait_s > 1)
    with cluster.ask(headers={"x-diptych-slo": "batch"}) as answer:
        assert (answer.status, int(answer.headers["retry-after"]) >= 2) == (429, True)
        assert "requests of tier 'batch' are refused now" in json.load(answer)["error"]["message"]
    assert cluster.post("/v1/completions", {"prompt": "p", "slo": {"tier": "flex"}})[0] == 429
    assert cluster.post("/v1/completions", {"prompt": "p"})[0] == 200
    cluster.release(cluster.decode())
    assert chat.getresponse().status == 200
    chat.close()
    page = cluster.get("/metrics")[1]
    for name, counts in {"offered": (2, 1, 1, 1), "shed": (0, 0, 1, 1)}.items():
        for tier, count in zip(("default", "chat", "flex", "batch"), counts, strict=True):
            assert f'diptych_router_{name}_total{{tier="{tier}"}} {count:.1f}' in page
    assert 'diptych_router_within_objectives_total{tier="default"} 2.0' in page


@pytest.mark.parametrize("name", RENAMED)
def test_who_gives_an_option_by_its_former_name_is_told_the_new_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, now = (f"--{each.replace('_', '-')}" for each in (name, RENAMED[name]))
    assert f"{flag} is {now}" in RouterConfig.advice([f"{flag}=2"])
    monkeypatch.setenv(f"DIPTYCH_{name.upper()}", "2")
    with pytest.raises(ConfigError, match=now):
        RouterConfig(insecure=True).validate()
