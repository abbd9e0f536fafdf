"""Pages in browsers as clients: what a browser asks first, and what it lets a script see."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.router.keys.keyring import digest_of

Cluster = Any
CHAT = "/v1/chat/completions"
PAGE = "https://chat.example"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-diptych-session",
}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nsha256 = "{digest_of("a-key").hex()}"\nrequests_per_minute = 1\n')
    return path


def ask(
    cluster: Cluster, method: str, path: str, headers: Mapping[str, str], body: Any = None
) -> tuple[int, Mapping[str, str]]:
    """Return the status and what the browser reads of the head."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), dict(headers))
        with connection.getresponse() as answer:
            answer.read()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def test_without_the_option_no_page_is_a_client(cluster: Cluster) -> None:
    status, head = ask(cluster, "OPTIONS", CHAT, PREFLIGHT)
    assert (status, [name for name in head if name.startswith("access-control")]) == (405, [])
    status, head = ask(cluster, "POST", CHAT, {"origin": PAGE}, HELLO)
    assert (status, [name for name in head if name.startswith("access-control")]) == (200, [])


def test_a_browser_may_ask_first_without_a_key(start_cluster: Callable[..., Cluster], keys: Path) -> None:
    cluster = start_cluster(cors_origins=(PAGE,), api_keys_file=keys)
    status, head = ask(cluster, "OPTIONS", CHAT, PREFLIGHT)
    assert status == 200
    assert head["access-control-allow-origin"] == PAGE
    assert "POST" in head["access-control-allow-methods"]
    assert head["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "access-control-allow-credentials" not in head


def test_answers_streams_and_errors_are_shown_to_a_page(start_cluster: Callable[..., Cluster], keys: Path) -> None:
    cluster = start_cluster(cors_origins=(PAGE,), api_keys_file=keys)
    known = {"origin": PAGE, "authorization": "Bearer a-key"}
    answers = [
        ask(cluster, "POST", CHAT, known, {**HELLO, "stream": True}),
        ask(cluster, "POST", CHAT, known, HELLO),  # one too many in this minute
        ask(cluster, "POST", CHAT, {"origin": PAGE}, HELLO),
        ask(cluster, "POST", "/v1/nothing", known),
        ask(cluster, "GET", "/v1/models", known),
    ]
    assert [status for status, _ in answers] == [200, 429, 401, 404, 200]
    assert {head.get("access-control-allow-origin") for _, head in answers} == {PAGE}
    assert answers[0][1]["content-type"].startswith("text/event-stream")
    shown = {name.strip() for name in answers[1][1]["access-control-expose-headers"].split(",")}
    assert shown >= {"retry-after", "x-request-id", "request-id"}
    assert {"retry-after", "x-request-id"} <= answers[1][1].keys()


def test_pages_of_other_origins_are_not_clients(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(cors_origins=(PAGE, "http://localhost:3000"))
    status, head = ask(cluster, "OPTIONS", CHAT, {**PREFLIGHT, "origin": "https://other.example"})
    assert (status, "access-control-allow-origin" in head) == (400, False)
    _, head = ask(cluster, "POST", CHAT, {"origin": "https://other.example"}, HELLO)
    assert "access-control-allow-origin" not in head


def test_a_star_means_every_page(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(cors_origins=("*",))
    _, head = ask(cluster, "POST", "/v1/messages", {"origin": PAGE}, {**HELLO, "max_tokens": 3})
    assert (head["access-control-allow-origin"], "request-id" in head) == ("*", True)


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://*.example/x", "null"])
def test_what_no_page_has_as_its_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins takes"):
        RouterConfig(cors_origins=(origin,)).validate()
