"""Legs that fail: the other leg is aborted, the request goes on elsewhere, and its output stays exact."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from diptych.common.members.roles import Role
from diptych.v1 import worker_pb2

Cluster = Any
SCRIPT = "Zoë says: 你好 🙂! And then some more, until the end."

RETRYABLE = [
    worker_pb2.ERROR_CODE_OVERLOADED,
    worker_pb2.ERROR_CODE_PEER_LOST,
    worker_pb2.ERROR_CODE_TRANSFER_FAILED,
    worker_pb2.ERROR_CODE_RETRACTED,
    worker_pb2.ERROR_CODE_ABORTED,
]


@pytest.fixture
def cluster(start_cluster: Any) -> Cluster:
    """Two prefill and two decode workers."""
    cluster = start_cluster(2, 2)
    cluster.script = SCRIPT
    return cluster


def stream(cluster: Cluster, path: str = "/v1/completions", **fields: Any) -> tuple[int, list[Any]]:
    """Return the status and every event of a stream; `[DONE]` is None."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", path, json.dumps({"prompt": "p", "max_tokens": 5000, "stream": True, **fields}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        return answer.status, [json.loads(body)]
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return 200, [None if event == b"[DONE]" else json.loads(event) for event in events]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event)


def fail_all(cluster: Cluster, role: str, fault: Any, times: int = 1) -> None:
    """Whichever worker of a role is chosen fails, so many times each."""
    for index in range(2):
        getattr(cluster, role)(index).faults = [fault] * times


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("code", RETRYABLE)
def test_a_leg_that_fails_at_once_is_tried_again_unseen(cluster: Cluster, fail: Any, role: str, code: int) -> None:
    getattr(cluster, role)(0).faults = [fail(0, code)]
    getattr(cluster, role)(1).faults = []
    for _ in range(2):  # the failing worker gets one of them
        assert cluster.complete("p")["text"] == SCRIPT
    assert sum(len(worker.started) for worker in cluster.workers) == 6
    rooms = [leg.room for worker in cluster.workers for leg in worker.started]
    assert len(set(rooms)) == 3


def test_the_failed_worker_is_avoided_and_the_other_leg_aborted(cluster: Cluster, fail: Any, hang: Any) -> None:
    fail_all(cluster, "prefill", hang(0))
    fail_all(cluster, "decode", fail(0, worker_pb2.ERROR_CODE_OVERLOADED))
    for worker in cluster.workers:
        worker.released.clear()
    cluster.prefill(0).faults = [hang(0)]
    cluster.prefill(1).faults = []
    cluster.decode(1).faults = []
    assert cluster.complete("p")["text"] == SCRIPT


@pytest.mark.parametrize("after", [1, 2, 5, 12, 20, 40])
@pytest.mark.parametrize("kind", ["error", "break"])
def test_a_stream_whose_decode_worker_fails_goes_on_exactly(
    cluster: Cluster, fault: Any, kind: str, after: int
) -> None:
    cluster.decode(0).faults = [fault(kind, after, worker_pb2.ERROR_CODE_RETRACTED)]
    for _ in range(2):  # one of them on the failing worker
        status, events = stream(cluster)
        assert (status, text_of(events), events[-1]) == (200, SCRIPT, None)
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
    replays = [leg for worker in cluster.workers for leg in worker.started if leg.num_prior_output_tokens]
    assert len(replays) == 2
    prior = replays[0].num_prior_output_tokens
    assert 1 <= prior <= after + 1  # what decode said, and prefill's first token
    tokens = cluster.tokenizer.encode("p" + SCRIPT)
    assert list(replays[0].prompt_token_ids) == tokens[: 1 + prior]
    assert replays[0].sampling.max_tokens == 2048 - 1 - prior


def test_however_late_the_first_token_is_what_decode_says_comes_after_it(
    start_cluster: Any, fail: Any, hang: Any
) -> None:
    cluster = start_cluster()
    cluster.prefill().faults, cluster.decode().faults = [hang(0)], [fail(1, worker_pb2.ERROR_CODE_RETRACTED)]
    connection = cluster.connect()
    cluster.wait_for(lambda: all(worker.started for worker in cluster.workers))
    assert cluster.complete()["text"] == "Hello!"  # meanwhile it could have failed
    cluster.release(cluster.prefill())
    assert json.load(connection.getresponse())["choices"][0]["text"] == "Hello!"
    connection.close()
    assert [leg.num_prior_output_tokens for leg in cluster.decode().started] == [0, 0, 2]


def test_a_replay_draws_the_same_tokens(cluster: Cluster, fail: Any) -> None:
    cluster.script = None
    wanted = cluster.complete("p", seed=3, max_tokens=40)["text"]
    fail_all(cluster, "decode", fail(9, worker_pb2.ERROR_CODE_RETRACTED))
    assert text_of(stream(cluster, seed=3, max_tokens=40)[1]) == wanted


def test_usage_counts_each_token_once_over_a_replay(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "decode", fail(9, worker_pb2.ERROR_CODE_RETRACTED))
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 5000})
    assert status == 200
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, len(SCRIPT.encode()) + 1)


def test_stop_strings_are_found_across_a_replay(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "decode", fail(7, worker_pb2.ERROR_CODE_RETRACTED))
    status, events = stream(cluster, stop=["says"])
    assert (status, text_of(events)) == (200, "Zoë ")


def test_a_request_that_was_complete_when_its_worker_died_needs_no_replay(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "decode", fail(0, worker_pb2.ERROR_CODE_PEER_LOST))
    fail_all(cluster, "prefill", fail(1, worker_pb2.ERROR_CODE_ABORTED))
    cluster.script = ""  # the first token, from prefill, is the end
    choice = cluster.complete("p")
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_prefill_is_not_missed_once_decode_has_everything(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "prefill", fail(1, worker_pb2.ERROR_CODE_TRANSFER_FAILED))
    cluster.decode(0).step_s = cluster.decode(1).step_s = 0.001
    assert text_of(stream(cluster)[1]) == SCRIPT


def test_an_aborted_leg_waits_for_its_peers_reason(
    cluster: Cluster, fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.serve.attempt.REASON_GRACE_S", 200.0)
    fail_all(cluster, "prefill", fail(0, worker_pb2.ERROR_CODE_ABORTED))
    fail_all(cluster, "decode", fail(0, worker_pb2.ERROR_CODE_INVALID))
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 5000})
    assert (status, answer["error"]["message"]) == (400, "decode: told to fail")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (worker_pb2.ERROR_CODE_INVALID, 400),
        (worker_pb2.ERROR_CODE_DEADLINE, 504),
        (worker_pb2.ERROR_CODE_INTERNAL, 500),
    ],
)
def test_what_retrying_cannot_help_is_answered_at_once(
    cluster: Cluster, fail: Any, hang: Any, code: int, status: int
) -> None:
    fail_all(cluster, "prefill", hang(0), times=2)
    fail_all(cluster, "decode", fail(0, code), times=2)
    assert cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 5000})[0] == status
    assert stream(cluster)[0] == status
    decodes, prefills = (
        sum(len(getattr(cluster, role)(i).started) for i in range(2)) for role in ("decode", "prefill")
    )
    assert decodes == 2
    assert prefills <= 2  # one that has failed already may end the other leg before that is started


def test_attempts_are_bounded(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "decode", fail(0, worker_pb2.ERROR_CODE_PEER_LOST), times=9)
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 5000})
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "server_error", "unavailable")
    assert (
        sum(len(worker.started) for worker in cluster.workers if worker.instance.role == cluster.decode().instance.role)
        == 4
    )


def test_when_every_worker_is_overloaded_the_client_is_told_when_to_come_back(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "decode", fail(0, worker_pb2.ERROR_CODE_OVERLOADED), times=9)
    with cluster.ask() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert json.load(answer)["error"]["code"] == "rate_limit_exceeded"
    assert {len(worker.started) > 0 for worker in cluster.workers} == {True}


def test_a_stream_that_cannot_go_on_ends_with_an_error_event(cluster: Cluster, fail: Any) -> None:
    fail_all(cluster, "decode", fail(3, worker_pb2.ERROR_CODE_INTERNAL))
    status, events = stream(cluster)
    assert status == 200
    assert SCRIPT.startswith(text_of(events[:-1]))
    assert events[-1] == {
        "error": {"message": "decode: told to fail", "type": "server_error", "param": None, "code": "internal_error"}
    }


def test_one_failed_choice_fails_them_all(cluster: Cluster, fail: Any) -> None:
    cluster.decode(0).faults = [fail(3, worker_pb2.ERROR_CODE_INTERNAL)]
    status, _ = cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 5000, "n": 8})
    assert status == 500
    cluster.wait_for(lambda: not any(worker.running for worker in cluster.workers))


def test_a_deadline_ends_a_request_that_nobody_answers(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(request_timeout_s=0.3)
    cluster.prefill().faults, cluster.decode().faults = [hang(0)] * 100, [hang(0)] * 100
    while not all(worker.started for worker in cluster.workers):  # in time: a busy machine may need more of it
        status, answer = cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 5000})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    cluster.wait_for(lambda: all(worker.aborted for worker in cluster.workers))


def test_a_stream_that_loses_its_worker_when_nobody_is_coming_ends_at_once_and_says_who_is_missing(
    cluster: Cluster, hang: Any
) -> None:
    """It may wait for 200 s; but no prefill worker has come for longer than that."""
    cluster.decode(0).faults = [hang(3)]
    cluster.decode(1).faults = [hang(3)]
    with cluster.ask(stream=True) as answer:
        cluster.wait_until(lambda: cluster.router.fleet.num_open_legs(Role.DECODE) == 1)
        cluster.wait_until(lambda: cluster.router.fleet.num_open_legs(Role.PREFILL) == 0)
        cluster.publish(cluster.decode(0), cluster.decode(1))
        cluster.wait_until(lambda: cluster.router.fleet.missing_since_s is not None)
        cluster.router.fleet.missing_since_s -= 1000.0
        cluster.publish()
        *_, last = [json.loads(line[6:]) for line in answer.read().decode().split("\n\n") if line.startswith("data: {")]
    assert last["error"]["code"] == "unavailable"
    assert "no prefill worker for tiny is usable: none is registered; waited 0." in last["error"]["message"]


def test_a_request_that_gets_no_pair_hears_who_is_missing_and_when_to_come_back(start_cluster: Any) -> None:
    cluster = start_cluster(1, 0, pair_wait_s=0.05)
    with cluster.ask() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        message = json.loads(answer.read())["error"]["message"]
    assert message.startswith("no decode worker for tiny is usable: none is registered; waited ")
