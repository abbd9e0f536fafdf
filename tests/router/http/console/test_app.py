"""The page's address: who is led there, what every answer carries, and what is nobody's."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest

Cluster = Any
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(cors_origins=("*",))


def ask(
    cluster: Cluster, method: str, path: str, headers: dict[str, str] | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=60)
    connection.request(method, path, headers=headers or {})
    with connection.getresponse() as answer:
        body = answer.read()
    connection.close()
    return answer, body


@pytest.mark.parametrize("path", ["/", "/console"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_browsers_are_led_to_the_page(cluster: Cluster, path: str, method: str) -> None:
    answer, body = ask(cluster, method, path, BROWSER)
    assert (answer.status, answer.headers["location"], body) == (303, "console/", b"")


@pytest.mark.parametrize("headers", [{}, {"accept": "application/json"}, {"accept": "*/*"}])
def test_programs_that_ask_for_the_address_alone_are_told_what_there_is(
    cluster: Cluster, headers: dict[str, str]
) -> None:
    answer, body = ask(cluster, "GET", "/", headers)
    assert (answer.status, json.loads(body)["name"]) == (200, "diptych")


@pytest.mark.parametrize(
    "path", ["/console/nothing.js", "/console/../wiring.py", "/console/%2e%2e/app.py", "/console//etc/passwd"]
)
def test_what_is_no_file_of_the_page_is_not_found(cluster: Cluster, path: str) -> None:
    assert ask(cluster, "GET", path)[0].status == 404


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/nothing.js", "/console/api/nothing"])
def test_every_answer_carries_what_browsers_heed_and_nothing_for_other_origins(cluster: Cluster, path: str) -> None:
    answer, _ = ask(cluster, "GET", path, {"origin": "https://elsewhere.example"})
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


def test_the_page_is_served_with_its_scripts_to_everybody(cluster: Cluster) -> None:
    answer, body = ask(cluster, "GET", "/console/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    scripts = re.findall(rb'(?:src|href)="([^":]+)"', body)
    assert scripts
    for script in scripts:
        found, _ = ask(cluster, "GET", f"/console/{script.decode()}")
        assert (found.status, found.headers["cache-control"]) == (200, "no-cache")
        again, nothing = ask(cluster, "GET", f"/console/{script.decode()}", {"if-none-match": found.headers["etag"]})
        assert (again.status, nothing) == (304, b"")


def test_a_method_that_a_path_does_not_take_is_refused_in_json(cluster: Cluster) -> None:
    answer, body = ask(cluster, "DELETE", "/console/app.js")
    assert (answer.status, {*answer.headers["allow"].split(", ")}) == (405, {"GET", "HEAD"})
    assert "DELETE" in json.loads(body)["error"]


def test_without_the_console_there_is_none(start_cluster: Any) -> None:
    cluster = start_cluster(0, 0, console="off")
    for path in ("/console", "/console/", "/console/api/me", "/console/api/fleet"):
        assert ask(cluster, "GET", path, BROWSER)[0].status == 404
    answer, body = ask(cluster, "GET", "/", BROWSER)
    assert (answer.status, json.loads(body)["name"]) == (200, "diptych")
