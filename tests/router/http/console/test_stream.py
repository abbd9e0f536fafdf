"""The live stream, read by a client over HTTP."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import pytest

from diptych.router.console.merge_patch import merged

PREFILL = f"{100:016x}"
DROPPED = "dropped a viewer of the console that took too little"


@pytest.fixture
def cluster(start_cluster: Any, trust: Any) -> Any:
    return start_cluster(trust=trust)


@pytest.fixture
def client(cluster: Any, client_of: Any) -> Any:
    return client_of(cluster)


def is_watched(cluster: Any) -> bool:
    return any("Watches._follow" in name for name in cluster.names_of_tasks())


def num_streams(cluster: Any) -> int:
    """Streams whose clients the router believes to be there."""
    return sum(name == "_cancel_on_disconnect" for name in cluster.names_of_tasks())


def test_a_viewer_sees_a_snapshot_and_then_what_changes(cluster: Any, client: Any) -> None:
    with client.follow("fleet", "viewer") as events:
        assert events.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert events.answer.headers["cache-control"] == "no-store"
        assert next(events) == ("ping", {})
        document = events.until("snapshot", "fleet")["state"]
        assert document["workers"][PREFILL]["state"] == "ready"
        cluster._loop.call_soon_threadsafe(cluster.prefill().drain)
        while document["workers"][PREFILL]["state"] != "draining":
            document = merged(document, events.until("patch", "fleet")["patch"])


def test_every_topic_that_is_asked_for_comes_and_no_other(client: Any) -> None:
    with client.follow("requests,cache,charts,steps", "viewer") as events:
        topics = [events.until("snapshot")["topic"] for _ in range(3)]
    assert sorted(topics) == ["cache", "charts", "requests"]


def test_a_call_is_seen_while_it_runs(cluster: Any, client: Any, hang: Any) -> None:
    cluster.decode().faults = [hang(2)]
    with client.follow("requests", "viewer") as events:
        document = events.until("snapshot")["state"]
        connection = cluster.connect(headers={"x-request-id": "mine"})
        while document["rows"].get("mine", {}).get("phase") != "output":
            document = merged(document, events.until("patch")["patch"])
        cluster.release(cluster.decode())
        connection.getresponse().read()
        connection.close()
        while document["rows"]["mine"]["phase"] != "ended":
            document = merged(document, events.until("patch")["patch"])
        assert document["rows"]["mine"]["outcome"] == "ok"


def test_workers_are_watched_only_while_somebody_looks(
    cluster: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.console.hub.LINGER_S", 0.1)
    assert not is_watched(cluster)
    with client.follow("fleet", "viewer") as events:
        events.until("snapshot")
        cluster.wait_until(lambda: is_watched(cluster))
    cluster.wait_until(lambda: not is_watched(cluster))


def test_a_viewer_that_has_left_is_noticed(cluster: Any, client: Any) -> None:
    with client.follow("fleet", "viewer") as events:
        events.until("snapshot")
        assert num_streams(cluster) == 1
    cluster.wait_until(lambda: num_streams(cluster) == 0)


def test_more_viewers_than_there_are_places_for_are_told_to_come_again(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.router.console.hub.MAX_VIEWERS", 2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(client.follow("fleet", "viewer")).until("snapshot")
        answer = client.ask("GET", "/console/api/stream?topics=fleet", "viewer")
        assert (answer.status, answer.headers["retry-after"]) == (503, "10")


def test_a_viewer_that_reads_nothing_loses_its_place_and_the_others_go_on(
    cluster: Any, client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diptych.router.console.viewer.MAX_WAITING_BYTES", 350_000)
    monkeypatch.setattr("diptych.router.console.hub.INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO, "diptych.router.console.hub")
    with client.follow("fleet", "viewer") as slow, client.follow("fleet", "viewer") as quick:
        slow.until("snapshot")
        quick.until("snapshot")
        for number in range(400):  # far more than the kernel takes for who reads nothing
            _tell(cluster, quick, f"{number}{'x' * 100_000}")
            if DROPPED in caplog.messages:
                break
        assert caplog.messages.count(DROPPED) == 1
        _tell(cluster, quick, "the last")
        assert "the last" not in str(list(slow)), "its stream ends before"


def _tell(cluster: Any, viewer: Any, words: str) -> None:
    """Have what a worker says of itself change, and the viewer see it."""
    cluster.call(_be_not_ready(cluster.prefill(), words))
    while viewer.until("patch")["patch"].get("workers", {}).get(PREFILL, {}).get("not_ready") != words:
        pass


def test_streams_end_when_the_router_leaves(cluster: Any, client: Any) -> None:
    with client.follow("fleet", "viewer") as events:
        events.until("snapshot")
        cluster.stop_router()
        assert all(kind in ("patch", "ping") for kind, _ in events)


def test_a_router_that_is_drained_ends_streams_and_begins_none(cluster: Any, client: Any, hang: Any) -> None:
    cluster.decode().faults = [hang(2)]
    connection = cluster.connect()
    with client.follow("fleet", "viewer") as events:
        events.until("snapshot")
        assert client.ask("POST", "/admin/drain?deadline_s=100", "operator").status == 202
        assert all(kind in ("patch", "ping") for kind, _ in events)
        answer = client.ask("GET", "/console/api/stream", "viewer")
        assert (answer.status, "drained" in answer.json["error"]) == (503, True)
        assert client.ask("GET", "/console/api/fleet", "viewer").status == 200
    cluster.release(cluster.decode())
    connection.getresponse().read()
    connection.close()


def test_pings_come(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.router.console.hub.PING_S", 0.0)
    with client.follow("fleet", "viewer") as events:
        assert [events.until("ping") for _ in range(3)] == [{}] * 3


async def _be_not_ready(worker: Any, words: str) -> None:
    worker.instance.not_ready = words
    worker._send_record()
