"""What operators do from the console: done in their name, from this origin, told as it went, and written down."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

PREFILL, DECODE = f"{100:016x}", f"{101:016x}"
OPERATOR = "Bearer operator-secret-of-tests"


@pytest.fixture
def cluster(start_cluster: Any, trust: Any) -> Any:
    return start_cluster(trust=trust)


@pytest.fixture
def client(cluster: Any, client_of: Any) -> Any:
    return client_of(cluster)


def act(client: Any, name: str, body: Any, **headers: str) -> Any:
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.ask("POST", f"/console/api/acts/{name}", "operator", body, fields)


def test_a_worker_is_drained_in_the_operators_name(cluster: Any, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diptych.router.console.acts")
    answer = act(client, "drain", {"instance": PREFILL, "deadline_s": 2.5})
    assert (answer.status, answer.json) == (200, {"instance": PREFILL})
    admin = cluster.prefill().admin
    (request,) = admin.drains
    assert (request.instance_id, request.deadline_ms, admin.authorizations) == (100, 2500, [OPERATOR])
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("acts")]
    assert line.startswith("act of operator at 127.0.0.1:")
    assert line.endswith(f"drain, instance {PREFILL}: done")
    assert "secret" not in line


def test_without_a_deadline_the_workers_own_holds(cluster: Any, client: Any) -> None:
    act(client, "drain", {"instance": DECODE})
    act(client, "drain", {"instance": DECODE, "deadline_s": None})
    assert [request.HasField("deadline_ms") for request in cluster.decode().admin.drains] == [False, False]


def test_a_role_is_changed(cluster: Any, client: Any) -> None:
    answer = act(client, "role", {"instance": DECODE, "role": "unified"})
    assert answer.json == {"instance": DECODE, "previous_role": "decode", "not_ready": ""}
    assert cluster.decode if cluster.workers[1].admin.authorizations == [OPERATOR] else None


def test_a_log_level_is_changed(cluster: Any, client: Any) -> None:
    answer = act(client, "log-level", {"instance": PREFILL, "level": "debug"})
    assert (answer.json, cluster.prefill().admin.log_level) == (
        {"instance": PREFILL, "previous_level": "info"},
        "debug",
    )


def test_an_adapter_is_loaded_and_unloaded_everywhere(cluster: Any, client: Any) -> None:
    assert act(client, "load-adapter", {"name": "a", "path": "/adapters/a"}).json == {"name": "a", "num_workers": 2}
    assert [[lora.name for lora in worker.instance.loras] for worker in cluster.workers] == [["a"], ["a"]]
    assert act(client, "unload-adapter", {"name": "a"}).json == {"name": "a", "num_workers": 2}
    assert act(client, "unload-adapter", {"name": "a"}).status == 404


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, 403),
        (grpc.StatusCode.FAILED_PRECONDITION, 409),
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.UNIMPLEMENTED, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_what_the_worker_says_is_passed_on(
    cluster: Any, client: Any, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode, status: int
) -> None:
    caplog.set_level(logging.INFO, "diptych.router.console.acts")
    cluster.prefill().admin.failure = code
    answer = act(client, "drain", {"instance": PREFILL})
    assert (answer.status, answer.json) == (status, {"error": "told to fail"})
    assert [True for record in caplog.records if "told to fail" in record.getMessage()]


def test_a_worker_that_is_gone_is_told_so(cluster: Any, client: Any) -> None:
    for instance in ("", "f" * 16, "100", "../x", "<b>"):
        answer = act(client, "drain", {"instance": instance})
        assert (answer.status, [*answer.json]) == (404, ["error"])
    cluster.stop_worker(cluster.prefill())
    assert act(client, "drain", {"instance": PREFILL}).status in (404, 503)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("drain", {}),
        ("drain", {"instance": 100}),
        ("drain", {"instance": PREFILL, "deadline_s": -1}),
        ("drain", {"instance": PREFILL, "deadline_s": "soon"}),
        ("drain", {"instance": PREFILL, "also": 1}),
        ("drain", [PREFILL]),
        ("role", {"instance": PREFILL, "role": "router"}),
        ("log-level", {"instance": PREFILL, "level": "loud"}),
        ("load-adapter", {"name": "a"}),
        ("unload-adapter", {"name": 1}),
    ],
)
def test_a_body_that_is_wrong_is_refused_and_nothing_is_done(cluster: Any, client: Any, name: str, body: Any) -> None:
    answer = act(client, name, body)
    assert (answer.status, [*answer.json]) == (400, ["error"])
    assert cluster.prefill().admin.num_calls == 0


def test_a_body_that_is_too_long_is_refused(client: Any) -> None:
    assert act(client, "unload-adapter", {"name": "a" * 100_000}).status == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "https://elsewhere.example", "sec_fetch_site": "cross-site"},
    ],
)
def test_pages_of_other_origins_can_not_act(cluster: Any, client: Any, headers: dict[str, str]) -> None:
    assert act(client, "drain", {"instance": PREFILL}, **headers).status == 403
    assert cluster.prefill().admin.num_calls == 0


def test_the_page_itself_can(cluster: Any, client: Any) -> None:
    for headers in ({"origin": cluster.url}, {"origin": cluster.url, "sec_fetch_site": "same-origin"}):
        assert act(client, "drain", {"instance": PREFILL}, **headers).status == 200


def test_a_form_can_not_act(cluster: Any, client: Any) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert act(client, "drain", {"instance": PREFILL}, content_type=kind).status == 400
    assert cluster.prefill().admin.num_calls == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost:1", 200), ("[::1]:1", 200), ("rebound.example:1", 403), ("", 403)],
)
def test_without_tokens_a_strangers_name_for_this_address_does_not_help(
    start_cluster: Any, client_of: Any, host: str, status: int
) -> None:
    cluster = start_cluster()
    fields = {"host": host, "origin": f"http://{host}"}
    answer = client_of(cluster).ask("POST", "/console/api/acts/drain", "", {"instance": PREFILL}, fields)
    assert answer.status == status
    assert cluster.prefill().admin.authorizations == ([None] if status == 200 else [])
