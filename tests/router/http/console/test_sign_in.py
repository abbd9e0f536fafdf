"""Signing in over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CODE, TOKEN = "the-one-time-code", "operator-secret-of-tests"


@pytest.fixture
def client(start_cluster: Any, trust: Any, client_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "code"
    file.write_text(f"{CODE}\n{TOKEN}\n")
    monkeypatch.setenv("DIPTYCH_CONSOLE_CODE_FILE", str(file))
    return client_of(start_cluster(0, 0, trust=trust))


def sign_in(client: Any, body: Any, **headers: str) -> Any:
    return client.ask("POST", "/console/api/sign-in", "", body, headers)


def test_the_code_is_worth_an_operators_token_once(client: Any) -> None:
    answer = sign_in(client, {"code": CODE})
    assert (answer.status, answer.json, answer.headers["cache-control"]) == (200, {"token": TOKEN}, "no-store")
    assert client.ask("GET", "/console/api/me", "operator").json["is_operator"]
    assert sign_in(client, {"code": CODE}).status == 401


def test_a_wrong_code_is_refused_and_after_some_of_them_all_wait(client: Any) -> None:
    assert [sign_in(client, {"code": "wrong"}).status for _ in range(11)] == [401] * 10 + [429]
    answer = sign_in(client, {"code": CODE})
    assert (answer.status, 0 < int(answer.headers["retry-after"]) <= 60) == (429, True)


@pytest.mark.parametrize("body", [{}, {"code": 1}, {"code": CODE, "more": 1}, [], "code"])
def test_what_is_no_code_is_refused(client: Any, body: Any) -> None:
    assert sign_in(client, body).status == 400


def test_no_other_page_may_try(client: Any) -> None:
    assert sign_in(client, {"code": CODE}, origin="https://elsewhere.example").status == 403
    assert sign_in(client, {"code": CODE}).status == 200


def test_the_code_is_not_taken_from_an_address(client: Any) -> None:
    assert client.ask("GET", f"/console/api/sign-in?code={CODE}").status in (404, 405)
    assert client.ask("POST", f"/console/api/sign-in?code={CODE}", "", {}).status == 400
