"""Draining over HTTP: who may, what it answers, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from diptych.common.draining import drain_route, progress_body
from diptych.common.refusals import Refusals
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.drain import DrainProgress, Phase

TOKEN = "0123456789abcdef"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


class Worker:
    """Implements `Drainable`: what was asked, and two instances."""

    def __init__(self) -> None:
        self.asked: list[float | None] = []

    def ask(self, within_s: float | None) -> None:
        self.asked.append(within_s)

    def progress(self) -> Mapping[str, DrainProgress]:
        left = 2 if self.asked else 0
        return {"a": DrainProgress(Phase.DRAINING, left, 1.23456, 9.0), "b": DrainProgress(Phase.EMPTY, 0, 0.0, 9.0)}


def call(
    worker: Worker,
    method: str,
    query: str = "",
    headers: Mapping[str, str] = AUTHORIZED,
    *,
    token: str = TOKEN,
    own_host: str = "10.0.0.1",
) -> tuple[int, Any]:
    async def answer() -> tuple[int, Any]:
        trust = Trust(Tokens.of_variable(token), None)
        app = Starlette(routes=[drain_route("/drain", worker, trust, Refusals())])
        from_here = httpx.ASGITransport(app, client=("10.0.0.1", 2345))
        async with httpx.AsyncClient(transport=from_here, base_url=f"http://{own_host}") as client:
            response = await client.request(method, f"/drain{query}", headers=dict(headers))
            return response.status_code, json.loads(response.content)

    return asyncio.run(answer())


def test_a_post_begins_a_drain_and_tells_how_far_it_is() -> None:
    worker = Worker()
    instances = {
        "a": {"phase": "draining", "requests_left": 2, "oldest_s": 1.235, "deadline_s": 9.0},
        "b": {"phase": "empty", "requests_left": 0, "oldest_s": 0.0, "deadline_s": 9.0},
    }
    assert call(worker, "POST", "?deadline_s=2.5") == (202, {"phase": "draining", "instances": instances})
    assert call(worker, "POST")[0] == 202
    assert worker.asked == [2.5, None]


def test_a_get_changes_nothing() -> None:
    worker = Worker()
    status, body = call(worker, "GET")
    assert (status, body["phase"], worker.asked) == (200, "draining", [])


@pytest.mark.parametrize("deadline_s", ["soon", "-1", "nan", "inf", ""])
def test_a_deadline_that_is_no_time_is_refused(deadline_s: str) -> None:
    worker = Worker()
    status, body = call(worker, "POST", f"?deadline_s={deadline_s}")
    assert (status, worker.asked) == (400, [])
    assert "deadline_s must be a number of seconds" in body["error"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer 0123456789abcdeX"}])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_who_does_not_know_the_token_neither_drains_nor_looks(method: str, headers: Mapping[str, str]) -> None:
    worker = Worker()
    status, body = call(worker, method, headers=headers)
    assert (status, worker.asked, list(body)) == (401, [], ["error"])


def test_a_process_that_serves_has_no_deadline() -> None:
    body = progress_body({"a": DrainProgress(Phase.SERVING, 1, 0.5, math.inf)})
    assert (body["phase"], body["instances"]["a"]["deadline_s"]) == ("serving", None)


def test_who_means_another_instance_drains_nobody() -> None:
    worker = Worker()
    assert call(worker, "POST", "?instance=c") == (404, {"error": "instance c is not here"})
    assert worker.asked == []
    assert call(worker, "POST", "?instance=b")[0] == 202


@pytest.mark.parametrize(
    ("party", "own_host", "read", "begun"),
    [
        ("worker", "10.0.0.1", 403, 202),  # itself, as in a hook
        ("worker", "10.0.0.2", 403, 403),
        ("router", "10.0.0.1", 200, 403),
        ("viewer", "10.0.0.2", 200, 403),
        ("operator", "10.0.0.2", 200, 202),
    ],
)
def test_a_worker_is_drained_by_operators_and_from_its_own_host(
    party: str, own_host: str, read: int, begun: int
) -> None:
    worker, token = Worker(), f"{party}:{TOKEN}"
    assert call(worker, "GET", token=token, own_host=own_host)[0] == read
    status, body = call(worker, "POST", token=token, own_host=own_host)
    assert (status, bool(worker.asked)) == (begun, begun == 202)
    if begun == 403:
        assert body["error"].startswith(f"POST /drain is not for the token or certificate of a {party}: it takes that")
