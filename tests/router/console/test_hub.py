"""Viewers begin with a snapshot and hear what follows; who is slow is dropped; nobody looks, nothing is done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Set
from typing import Any

import pytest

from diptych.common.errors import Unavailable
from diptych.router.console.feed import PING, Feed, StepsFeed, event
from diptych.router.console.hub import LINGER_S, MAX_VIEWERS, PING_S, Hub
from diptych.router.console.merge_patch import merged
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import Step, Steps
from diptych.router.console.viewer import MAX_WAITING_BYTES, Viewer


def parsed(stream: bytes) -> list[tuple[str, Any]]:
    """The events of a stream: (kind, data)."""
    blocks = [block.split("\n") for block in stream.decode().split("\n\n") if block]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in blocks]


class Worker:
    """A document that the test changes."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {"workers": {"a": {"queue_s": 1.0}}}
        self.num_looks = 0
        self.pause: Callable[[], object] = lambda: None  # what happens during a look

    def make(self) -> Pieces[dict[str, Any]]:
        self.num_looks += 1
        document = self.document
        self.pause()
        yield
        return document


class StepLog:
    """All steps of one worker."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, begun_ms: float) -> None:
        self.steps.append((begun_ms, 1.0, 2, 3, 4, [], []))

    @property
    def steps_end(self) -> int:
        return len(self.steps)

    def steps_since(self, cursor: int) -> tuple[int, Steps]:
        new = self.steps[cursor : cursor + 2]
        return cursor + len(new), {"workers": {"a": new} if new else {}}


class Gathered:
    """Notes what the hub wants."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[Set[str]] = []
        self.news = asyncio.Event()
        self.changed = asyncio.Event()

    def start(self) -> None:
        self.calls.append("start")
        self.news.set()

    def stop(self) -> None:
        self.calls.append("stop")
        self.news.set()

    async def ask_others(self, topics: Set[str]) -> None:
        self.asked.append(topics)
        self.news.set()

    async def wait_for_change(self) -> None:
        await self.changed.wait()
        self.changed.clear()


class Scene:
    """A hub over values, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.worker, self.log, self.gathered = Worker(), StepLog(), Gathered()
        sources = {"fleet": Feed("fleet", self.worker.make)}
        self.hub = Hub(sources, StepsFeed(self.log), self.gathered, lambda: self.now_s)
        self._fleet = self.hub._channels["fleet"]

    async def join(self, *topics: str) -> Viewer:
        viewer = self.hub.join(topics)
        await self._fleet.tell()
        return viewer

    async def change(self, **members: Any) -> None:
        self.worker.document = {"workers": {"a": members}}
        await self.look()

    async def look(self) -> None:
        """It is time to look."""
        self._fleet.hurry()
        await self._fleet.tell()
        self.hub.tell_of_steps()


def playing(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, 60))


async def heard(viewer: Viewer) -> list[tuple[str, Any]]:
    return [each for each in parsed(await viewer.receive()) if each[0] != "ping"]


def test_a_viewer_begins_with_a_snapshot_and_hears_what_changes() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("fleet")
        [(kind, data)] = await heard(viewer)
        assert (kind, data) == ("snapshot", {"topic": "fleet", "state": {"workers": {"a": {"queue_s": 1.0}}}})
        await scene.change(queue_s=None, state="ready")
        [(kind, data)] = await heard(viewer)
        assert (kind, data["patch"]) == ("patch", {"workers": {"a": {"queue_s": None, "state": "ready"}}})

    playing(play())


def test_what_has_not_changed_is_not_sent() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("fleet")
        await viewer.receive()
        scene.now_s = PING_S / 2  # after the first ping
        await scene.look()
        await scene.change(queue_s=1.0)
        await scene.change(queue_s=2.0)
        assert len(await heard(viewer)) == 1

    playing(play())


def test_viewers_that_come_at_different_times_have_the_same_document() -> None:
    async def play() -> None:
        scene = Scene()
        viewers, documents = [], []
        for number in range(4):
            viewers.append(await scene.join("fleet"))
            await scene.change(queue_s=float(number), **{f"of_{number}": number})
        for viewer in viewers:
            document: Any = {}
            for kind, data in await heard(viewer):
                document = data["state"] if kind == "snapshot" else merged(document, data["patch"])
            documents.append(document)
        assert documents == [scene.worker.document] * 4

    playing(play())


def test_all_viewers_of_a_topic_get_one_encoding() -> None:
    async def play() -> None:
        scene = Scene()
        viewers = [await scene.join("fleet") for _ in range(5)]
        scene.worker.num_looks = 0
        await scene.change(queue_s=2.0)
        assert scene.worker.num_looks == 1
        first, *others = [viewer._events[-1] for viewer in viewers]
        assert all(each is first for each in others)

    playing(play())


def test_each_viewer_is_told_once_of_the_steps_after_it_came() -> None:
    async def play() -> None:
        scene = Scene()
        viewers = []
        for number in range(4):
            scene.log.add(float(number))
            viewers.append(await scene.join("steps"))
            scene.log.add(number + 0.5)
        await scene.look()
        for number, viewer in enumerate(viewers):
            wanted, begun = scene.log.steps[2 * number + 1 :], list[float]()
            while len(begun) < len(wanted):
                begun += [step[0] for _, data in await heard(viewer) for step in data["workers"]["a"]]
            assert begun == [step[0] for step in wanted]

    playing(play())


def test_viewers_that_have_the_same_steps_get_one_encoding() -> None:
    log = StepLog()
    feed = StepsFeed(log)
    log.add(1.0)
    assert feed.part(0)[1] is feed.part(0)[1]
    assert feed.part(1) == (1, b"")
    log.add(2.0)
    assert parsed(feed.part(1)[1])[0][1]["workers"]["a"][0][0] == 2.0


def test_a_viewer_hears_of_its_topics_only() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("steps")
        await viewer.receive()
        await scene.change(queue_s=9.0)
        scene.log.add(1.0)
        await scene.look()
        assert [kind for kind, _ in await heard(viewer)] == ["steps"]

    playing(play())


def test_a_slow_viewer_is_dropped_and_the_others_go_on() -> None:
    async def play() -> None:
        scene = Scene()
        slow, quick = await scene.join("fleet"), await scene.join("fleet")
        text = "x" * (MAX_WAITING_BYTES // 4)
        for number in range(5):
            await scene.change(text=f"{number}{text}")
            await quick.receive()
        assert scene.hub.num_viewers == 1
        assert await slow.receive() == b""
        await scene.change(queue_s=1.0)
        assert await quick.receive()

    playing(play())


def test_a_first_event_may_be_longer_than_what_may_wait() -> None:
    viewer = Viewer(["fleet"])
    assert viewer.push(b"x" * (MAX_WAITING_BYTES + 1))
    assert not viewer.push(b"x")


def test_viewers_are_bounded_and_a_place_is_free_again() -> None:
    async def play() -> None:
        scene = Scene()
        viewers = [await scene.join("fleet") for _ in range(MAX_VIEWERS)]
        with pytest.raises(Unavailable, match="64 viewers"):
            await scene.join("fleet")
        scene.hub.leave(viewers[0])
        await scene.join("fleet")

    playing(play())


def test_a_hub_that_closes_ends_all_streams_and_begins_no_other() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("fleet")
        await viewer.receive()
        scene.hub.close()
        assert await viewer.receive() == b""
        with pytest.raises(Unavailable, match="drained"):
            await scene.join("fleet")

    playing(play())


def test_what_was_on_the_way_comes_before_the_end() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("fleet")
        scene.hub.close()
        assert (await heard(viewer))[0][0] == "snapshot"
        assert await viewer.receive() == b""

    playing(play())


def test_pings_come_though_nothing_changes() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("fleet")
        await scene.look()
        await viewer.receive()
        scene.now_s += PING_S
        await scene.look()
        assert await viewer.receive() == PING

    playing(play())


def test_a_topic_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        scene = Scene()
        viewer = await scene.join("fleet", "steps")
        await viewer.receive()
        scene.worker.document = {"workers": {object()}}
        scene.log.add(1.0)
        await scene.look()
        await scene.look()
        assert [kind for kind, _ in await heard(viewer)] == ["steps"]

    playing(play())
    assert [record.message for record in caplog.records] == ["the console can't show fleet"]


def test_gathering_begins_with_the_first_look_and_ends_a_while_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.router.console.hub.INTERVAL_S", 0.001)

    async def play() -> None:
        scene = Scene()
        running = asyncio.ensure_future(scene.hub.run())
        await asyncio.sleep(0)
        assert (scene.gathered.calls, scene.worker.num_looks) == ([], 0)
        viewer = scene.hub.join(["fleet"])
        await until(scene, lambda: scene.gathered.asked == [{"fleet"}])
        assert scene.gathered.calls == ["start"]
        scene.hub.leave(viewer)
        scene.now_s += LINGER_S / 2
        scene.hub.look()
        scene.now_s += LINGER_S
        await until(scene, lambda: scene.gathered.calls == ["start", "stop"])
        running.cancel()

    playing(play())


def test_a_topic_whose_looks_are_dear_is_looked_at_seldom_but_at_once_when_the_fleet_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.router.console.channel.MAX_SHARE", 1e-9)

    async def play() -> None:
        scene = Scene()
        running = asyncio.ensure_future(scene.hub.run())
        viewer = scene.hub.join(["fleet"])
        while not await heard(viewer):
            pass  # a ping
        scene.worker.document = {"workers": {"a": {"state": "draining"}}}
        scene.now_s += 10.0
        await scene._fleet.tell()
        assert scene.worker.num_looks == 1
        scene.gathered.changed.set()
        while not (events := await heard(viewer)):
            pass
        assert events[0][1]["patch"] == {"workers": {"a": {"queue_s": None, "state": "draining"}}}
        running.cancel()

    playing(play())


def test_who_comes_during_a_look_has_what_the_others_have() -> None:
    async def play() -> None:
        scene = Scene()
        late: list[Viewer] = []
        first = await scene.join("fleet")
        scene.worker.pause = lambda: late.append(scene.hub.join(["fleet"]))
        await scene.change(queue_s=7.0)
        assert [kind for kind, _ in await heard(first)] == ["snapshot", "patch"]
        assert await heard(late[0]) == [("snapshot", {"topic": "fleet", "state": scene.worker.document})]
        scene.worker.pause = lambda: None
        await scene.change(queue_s=8.0)
        assert await heard(late[0]) == await heard(first)

    playing(play())


def test_who_leaves_before_its_snapshot_is_sent_nothing() -> None:
    async def play() -> None:
        scene = Scene()
        viewer = scene.hub.join(["fleet"])
        scene.worker.pause = lambda: scene.hub.leave(viewer)
        await scene._fleet.tell()
        assert await viewer.receive() == PING
        await scene.look()
        assert (scene.hub.num_viewers, scene.worker.num_looks) == (0, 1)

    playing(play())


def test_somebody_who_comes_again_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.router.console.hub.INTERVAL_S", 0.001)

    async def play() -> None:
        scene = Scene()
        running = asyncio.ensure_future(scene.hub.run())
        for number in (1, 2):
            scene.hub.look()
            await until(scene, lambda number=number: scene.gathered.calls.count("start") == number)
            scene.now_s += LINGER_S
            await until(scene, lambda number=number: scene.gathered.calls.count("stop") == number)
        running.cancel()

    playing(play())


async def until(scene: Scene, condition: Any) -> None:
    while not condition():
        scene.gathered.news.clear()
        await scene.gathered.news.wait()


def test_names_from_outside_cannot_end_an_event() -> None:
    hostile = "</script>\n\nevent: evil\ndata: {}\r\n\u2028"
    stream = event("snapshot", {"topic": "fleet", "state": {hostile: hostile}})
    assert parsed(stream) == [("snapshot", {"topic": "fleet", "state": {hostile: hostile}})]
    assert stream.count(b"\n") == 3
