"""What a router says of itself to who knows only its address: probes, versions, paths that do not exist."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anthropic
import pytest

from diptych.router.keys.keyring import digest_of

Cluster = Any
OPEN = ["/", "/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/ready", "/version"]


def ask(cluster: Cluster, method: str, path: str) -> tuple[int, bytes, str]:
    """Return the status, the body and how long it is said to be."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    try:
        connection.request(method, path)
        with connection.getresponse() as answer:
            return answer.status, answer.read(), answer.headers["content-length"]
    finally:
        connection.close()


@pytest.mark.parametrize("path", [*OPEN, "/v1/models", "/v1/models/tiny", "/openapi.json", "/metrics"])
def test_head_is_answered_as_get_is_without_the_body(start_cluster: Callable[..., Cluster], path: str) -> None:
    cluster = start_cluster(0, 0)
    status, body, length = ask(cluster, "GET", path)
    assert body
    head = ask(cluster, "HEAD", path)
    assert head[:2] == (status, b"")
    assert path == "/metrics" or head[2] == length


def test_who_asks_for_a_version_or_a_ping_or_the_bare_address_needs_no_key(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\nsha256 = "{digest_of("a-key").hex()}"\n')
    cluster = start_cluster(api_keys_file=keys)
    answers = {path: ask(cluster, "GET", path) for path in OPEN}
    assert {status for status, _, _ in answers.values()} == {200}
    assert json.loads(answers["/version"][1]) == {"version": version("diptych")}
    assert "/v1/chat/completions" in json.loads(answers["/"][1])["apis"]
    assert ask(cluster, "POST", "/ping")[0] == 200
    assert ask(cluster, "GET", "/v1/models")[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)
def test_anthropics_clients_read_of_missing_paths_in_their_own_words(
    cluster: Cluster, method: str, path: str, status: int, kind: str
) -> None:
    found, body, _ = ask(cluster, method, path)
    answer = json.loads(body)
    assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    assert path in answer["error"]["message"]


def test_anthropics_client_finds_no_batches(cluster: Cluster) -> None:
    with (
        anthropic.Anthropic(base_url=cluster.url, api_key="-", max_retries=0) as client,
        pytest.raises(anthropic.NotFoundError) as missing,
    ):
        client.messages.batches.list()
    assert missing.value.type == "not_found_error"


def test_other_missing_paths_are_told_in_openais_words(cluster: Cluster) -> None:
    status, body, _ = ask(cluster, "GET", "/v1/messagesx")
    assert (status, json.loads(body)["error"]["type"]) == (404, "invalid_request_error")
