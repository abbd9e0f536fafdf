"""The documents of the console: for whom they are, what they say, and that names from outside change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.router.keys.keyring import digest_of

DOCUMENTS = ("fleet", "requests", "requests/some-id", "cache", "charts", "steps", "me", "stream")
ACTS = ("drain", "role", "load-adapter", "unload-adapter", "log-level")
PREFILL, DECODE = f"{100:016x}", f"{101:016x}"
HOSTILE = "<script>alert(1)</script>\"'&\u2028\n\nevent: x"


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any, trust: Any) -> Any:
    return start_shared_cluster(trust=trust, cors_origins=("*",), policy="pair_cost")


@pytest.fixture(scope="module")
def client(cluster: Any, client_of: Any) -> Any:
    return client_of(cluster)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_who_has_no_token_sees_nothing(client: Any, document: str) -> None:
    for party in ("", "a-token-of-nobody"):
        answer = client.ask("GET", f"/console/api/{document}", party)
        assert (answer.status, [*answer.json]) == (401, ["error"])
        assert "token" in answer.json["error"]


@pytest.mark.parametrize("party", ["viewer", "operator", "router"])
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each not in ("stream", "requests/some-id")])
def test_readers_see_all_documents(client: Any, document: str, party: str) -> None:
    answer = client.ask("GET", f"/console/api/{document}", party)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "application/json"
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_the_cache_is_told_with_the_tiers_of_workers_though_nobody_follows(client: Any) -> None:
    assert client.ask("GET", "/console/api/cache", "viewer").json["tiers"].keys() == {"pool"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_workers_see_none(client: Any, document: str) -> None:
    answer = client.ask("GET", f"/console/api/{document}", "worker")
    assert (answer.status, "operator" in answer.json["error"]) == (403, True)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("party", "status"), [("", 401), ("viewer", 403), ("router", 403), ("worker", 403)])
def test_only_operators_act(client: Any, cluster: Any, act: str, party: str, status: int) -> None:
    body = {"instance": PREFILL, "role": "decode", "name": "a", "path": "/a", "level": "debug", "deadline_s": 0}
    assert client.ask("POST", f"/console/api/acts/{act}", party, body).status == status
    assert [worker.admin.num_calls for worker in cluster.workers] == [0, 0]


@pytest.mark.parametrize(("party", "is_operator"), [("viewer", False), ("router", False), ("operator", True)])
def test_each_is_told_who_it_is(client: Any, party: str, is_operator: bool) -> None:
    told = client.ask("GET", "/console/api/me", party).json
    assert told == {"is_operator": is_operator, "text_allowed": False, "is_open": False}


def test_the_fleet_is_told_as_it_is(client: Any) -> None:
    fleet = client.ask("GET", "/console/api/fleet", "viewer").json
    assert (fleet["router"], fleet["model"], fleet["problem"]) == (f"{7:016x}", "tiny", None)
    assert {name: card["role"] for name, card in fleet["workers"].items()} == {PREFILL: "prefill", DECODE: "decode"}


def test_a_call_is_listed_found_and_told_whatever_its_names_are(client: Any, cluster: Any) -> None:
    client.ask("GET", "/console/api/requests", "viewer")  # from now on calls are followed
    body = {"prompt": "p", "user": HOSTILE}
    cluster.post("/v1/completions", body, {"x-request-id": "<b>/mine?"})
    listed = client.ask("GET", "/console/api/requests?limit=5", "viewer").json["rows"]
    row = listed["<b>/mine?"]
    assert (row["phase"], row["outcome"], row["tenant"], row["prefill"]) == ("ended", "ok", HOSTILE, PREFILL)
    for scope in ("", "?scope=here", "?scope=all"):
        story = client.ask("GET", f"/console/api/requests/%3Cb%3E/mine%3F{scope}", "viewer")
        assert (story.status, story.json["row"]["id"]) == (200, "<b>/mine?")
    assert client.ask("GET", "/console/api/requests?tenant=other", "viewer").json == {"rows": {}}
    assert client.ask("GET", "/console/api/requests?slow_s=3600", "viewer").json == {"rows": {}}


def test_a_call_that_nobody_knows_is_not_found(client: Any) -> None:
    answer = client.ask("GET", "/console/api/requests/nobody", "viewer")
    assert (answer.status, "nobody" in answer.json["error"]) == (404, True)


@pytest.mark.parametrize(
    "path",
    [
        "requests?phase=none",
        "requests?slow_s=nan",
        "requests?limit=x",
        "requests?scope=there",
        "charts?scope=there",
        "cache?scope=",
        "steps?since_ms=-1",
        "steps?since_ms=x",
        "stream?topics=fleet,nothing",
        "stream?topics=,",
    ],
)
def test_what_can_not_be_asked_for_is_refused_with_words(client: Any, path: str) -> None:
    answer = client.ask("GET", f"/console/api/{path}", "viewer")
    assert (answer.status, len(answer.json["error"]) > 10) == (400, True)


def test_head_is_answered_without_a_body(client: Any) -> None:
    for document in ("fleet", "me", "stream"):
        answer = client.ask("HEAD", f"/console/api/{document}", "viewer")
        assert (answer.status, answer.body) == (200, b"")


def test_who_fails_too_often_is_told_to_wait_and_who_may_look_never(
    start_cluster: Any, trust: Any, client_of: Any
) -> None:
    client = client_of(start_cluster(0, 0, trust=trust))
    statuses = [client.ask("GET", "/console/api/fleet", "a-token-of-nobody").status for _ in range(61)]
    assert statuses == [401] * 60 + [429]
    assert 0 < int(client.ask("GET", "/console/api/fleet").headers["retry-after"]) <= 60
    assert client.ask("GET", "/console/api/fleet", "viewer").status == 200


def test_where_everybody_is_trusted_nobody_signs_in(start_cluster: Any, client_of: Any) -> None:
    client = client_of(start_cluster(0, 0, console_text=True))
    told = client.ask("GET", "/console/api/me").json
    assert told == {"is_operator": True, "text_allowed": True, "is_open": True}


def test_with_keys_and_without_tokens_an_admins_key_opens_it(
    start_cluster: Any, client_of: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    lines = [f'[{name}]\nsha256 = "{digest_of(f"{name}-key").hex()}"\n' for name in ("alice", "ops")]
    keys.write_text("".join([*lines, "admin = true\n"]))
    client = client_of(start_cluster(1, 1, api_keys_file=keys))
    assert client.ask("GET", "/console/api/fleet").status == 401
    assert client.ask("GET", "/console/api/fleet", "alice-key").status == 403
    assert client.ask("POST", "/console/api/acts/drain", "alice-key", {"instance": PREFILL}).status == 403
    told = client.ask("GET", "/console/api/me", "ops-key").json
    assert told == {"is_operator": True, "text_allowed": False, "is_open": False}
    assert client.ask("GET", "/console/").status != 401
