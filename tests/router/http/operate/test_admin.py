"""What operators see: the workers as the router knows them, and why a request went where it went."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from diptych.cli.observe.status import StatusConfig, look, main
from diptych.common.errors import ConfigError
from diptych.common.net.ports import free_port
from diptych.common.trust.trust import INSECURE

Cluster = Any


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(prefill=1, decode=2)


def test_workers_are_listed_with_their_state_and_load(cluster: Cluster) -> None:
    status, text = cluster.get("/admin/workers")
    listed = json.loads(text)
    assert (status, listed["problem"], len(listed["router"])) == (200, None, 16)
    roles = {
        worker["instance"]: (worker["role"], worker["state"], worker["is_connected"]) for worker in listed["workers"]
    }
    assert roles == {
        f"{100:016x}": ("prefill", "ready", True),
        f"{101:016x}": ("decode", "ready", True),
        f"{102:016x}": ("decode", "ready", True),
    }
    prefill = next(worker for worker in listed["workers"] if worker["role"] == "prefill")
    assert {worker["only_here_pages"] is None for worker in listed["workers"]} == {not prefill["is_cache_known"]}
    assert (prefill["linked"], prefill["free_tokens"]) == ([f"{101:016x}", f"{102:016x}"], 160_000)


def test_a_request_is_explained_by_its_id(cluster: Cluster) -> None:
    cluster.post("/v1/completions", {"prompt": "p"}, {"x-request-id": "mine"})
    status, text = cluster.get("/admin/explain/mine")
    (request,) = json.loads(text)["requests"]
    (attempt,) = request["attempts"]
    assert (status, attempt["prefill_instance"], attempt["prompt_tokens"]) == (200, f"{100:016x}", 1)
    assert len(attempt["workers"]) == 3
    assert attempt["reason"]


@pytest.mark.parametrize("policy", ["power_of_two", "least_load", "cache_aware", "prefix_hash"])
def test_an_explanation_is_json_whatever_the_policy(cluster: Cluster, policy: str) -> None:
    cluster.post("/v1/completions", {"prompt": "p"}, {"x-request-id": policy, "x-diptych-policy": policy})
    status, text = cluster.get(f"/admin/explain/{policy}")
    assert (status, orjson.loads(text)["requests"][0]["attempts"][0]["outcome"]) == (200, "stop")


def test_what_is_not_known_is_said_in_json(cluster: Cluster) -> None:
    found = [cluster.get(path) for path in ("/admin/explain/yours", "/admin/explain/a%0Ab", "/admin/nothing")]
    assert [status for status, _ in found] == [404] * 3
    assert all(json.loads(text)["error"] for _, text in found)


def test_status_shows_what_a_router_knows_while_bootstrap_is_away(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPTYCH_AUTH_TOKEN", raising=False)
    config = StatusConfig(bootstrap=(f"127.0.0.1:{free_port()}",), router=f"{cluster.url}/", insecure=True, json=True)
    assert main(config) == 1, "bootstrap does not answer"
    report = json.loads(capsys.readouterr().out)
    assert report["problem"].startswith("can't ask bootstrap at 127.0.0.1")
    assert report["problem"].endswith(f"these are the workers that the router at {cluster.url}/ knows")
    members = [(each["role"], each["state"], each["instance_id"], each["problem"]) for each in report["members"]]
    assert sorted(members, key=lambda member: member[2]) == [
        ("prefill", "ready", f"{100:016x}", ""),
        ("decode", "ready", f"{101:016x}", ""),
        ("decode", "ready", f"{102:016x}", ""),
    ]


def test_status_says_both_where_neither_bootstrap_nor_a_router_answers(cluster: Cluster) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for router, words in (
        (f"http://{nobody}", "doesn't tell either: "),
        (f"{cluster.url}/v1", "answers HTTP status 404"),
    ):
        with pytest.raises(ConfigError, match=rf"can't ask bootstrap at .*; the router at {router} {words}"):
            look(StatusConfig(bootstrap=(nobody,), router=router), INSECURE)
