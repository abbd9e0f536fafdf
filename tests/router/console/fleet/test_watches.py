"""The streams that a router keeps to its workers while somebody looks: real gRPC, workers without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diptych.common.trust.trust import INSECURE
from diptych.router.console.fleet.fleet_view import FleetView
from diptych.router.console.fleet.watches import Watches
from diptych.router.console.pieces import at_once
from diptych.v1 import bootstrap_pb2
from diptych.v1.worker_pb2 import LINK_STATE_UP, LinkStatus, StepMark, StepRecords, WorkerNews, WorkerStatus

Cluster = Any  # the fixture's class: test helpers can't be imported
STEPS = StepRecords(
    began_s=[0.5],
    duration_s=[0.25],
    prompt_tokens=[100],
    output_tokens=[1],
    requests=[2],
    handed=[StepMark(step=0, room=0xAB)],
)


class Watching:
    """A cluster whose workers are watched, or not, from the thread of a test."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.now_s = 1000.0
        self._task = cluster.call(self._start())

    async def _start(self) -> asyncio.Task[None]:
        self.watches = Watches(self.cluster.router.fleet, INSECURE, lambda: self.now_s)
        return asyncio.create_task(self.watches.run())

    def start(self) -> None:
        self._soon(self.watches.start)

    def stop(self) -> None:
        self._soon(self.watches.stop)

    def tell(self, worker: Any, news: WorkerNews | None) -> None:
        self._soon(lambda: worker.tell(news))

    def _soon(self, act: Callable[[], None]) -> None:
        async def do() -> None:
            act()

        self.cluster.call(do())

    def close(self) -> None:
        async def end() -> None:
            self._task.cancel()
            await asyncio.wait([self._task])

        self.cluster.call(end())


@pytest.fixture
def watching(cluster: Cluster) -> Iterator[Watching]:
    watching = Watching(cluster)
    yield watching
    watching.close()


def open_rooms(watches: Watches, instance_id: int = 100) -> int | None:
    status = watches.status(instance_id)
    return None if status is None else status.open_rooms


def test_nobody_is_asked_before_somebody_looks(watching: Watching) -> None:
    cluster = watching.cluster
    cluster.complete()
    assert [worker.watchers for worker in cluster.workers] == [[], []]
    assert watching.watches.status(100) is None


def test_each_worker_is_asked_once_and_no_more_when_nobody_looks(watching: Watching) -> None:
    cluster, watches = watching.cluster, watching.watches
    watching.start()
    watching.start()
    cluster.wait_until(lambda: all(watches.status(worker.instance.instance_id) for worker in cluster.workers))
    assert [len(worker.watchers) for worker in cluster.workers] == [1, 1]
    watching.stop()
    watching.stop()
    cluster.wait_for(lambda: not any(worker.watchers for worker in cluster.workers))
    assert watches.status(100) is None
    watching.start()
    cluster.wait_for(lambda: all(worker.watchers for worker in cluster.workers))


def test_who_needs_to_know_waits_for_all_that_can_tell_and_for_nobody_else(watching: Watching) -> None:
    cluster, watches = watching.cluster, watching.watches
    watching.start()
    cluster.call(watches.wait_for_statuses(200.0))
    assert [watches.status(worker.instance.instance_id) is not None for worker in cluster.workers] == [True, True]
    watching.tell(cluster.workers[0], None)  # its stream ends, and is begun again after a pause
    cluster.wait_until(lambda: watches.status(100) is None)
    cluster.call(watches.wait_for_statuses(200.0))
    watching.stop()
    cluster.wait_until(lambda: watches.status(101) is None)
    cluster.call(watches.wait_for_statuses(0.01))


def test_what_a_worker_tells_is_known(watching: Watching) -> None:
    cluster, watches, worker = watching.cluster, watching.watches, watching.cluster.workers[0]
    watching.start()
    cluster.wait_until(lambda: watches.status(100))
    watching.now_s += 2.0
    first = [LinkStatus(peer_instance_id=101, state=LINK_STATE_UP, bytes_sent=1000)]
    watching.tell(worker, WorkerNews(status=WorkerStatus(open_rooms=3, links=first), has_links=True))
    cluster.wait_until(lambda: open_rooms(watches) == 3)
    watching.now_s += 2.0
    second = [LinkStatus(peer_instance_id=101, state=LINK_STATE_UP, bytes_sent=5000)]
    news = WorkerNews(status=WorkerStatus(open_rooms=4, links=second), has_links=True, steps=STEPS)
    watching.tell(worker, news)
    cluster.wait_until(lambda: open_rooms(watches) == 4)
    watching.tell(worker, WorkerNews(status=WorkerStatus(open_rooms=5)))
    cluster.wait_until(lambda: open_rooms(watches) == 5)
    assert [link.bytes_sent for link in watches.links(100)] == [5000]  # as before
    assert watches.link_rates(100) == {101: 2000.0}
    assert watches.rate(100) == {"steps_per_s": 0.2, "prompt_tokens_per_s": 25, "output_tokens_per_s": 0, "busy": 0.06}
    cursor, told = watches.steps_since(0)
    assert told == {"workers": {f"{100:016x}": [(1_003_500.0, 250.0, 100, 1, 2, ["00000000000000ab"], [])]}}
    assert watches.steps_since(cursor) == (cursor, {"workers": {}})


def test_a_worker_that_comes_is_watched_and_one_that_goes_is_not(watching: Watching) -> None:
    cluster, watches = watching.cluster, watching.watches
    watching.start()
    cluster.wait_until(lambda: watches.status(101))
    newcomer = cluster.add_worker(200, bootstrap_pb2.ROLE_DECODE)
    cluster.publish(*cluster.workers)
    cluster.wait_until(lambda: watches.status(200))
    cluster.publish(cluster.prefill(), newcomer)
    cluster.wait_until(lambda: watches.status(101) is None)
    assert len(newcomer.watchers) == 1


def test_a_worker_that_restarts_its_stream_is_asked_again(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.router.console.fleet.watches.RETRY_S", 0.01)
    cluster, worker = watching.cluster, watching.cluster.workers[0]
    watching.start()
    cluster.wait_for(lambda: worker.watchers)
    (before,) = worker.watchers
    watching.tell(worker, None)
    cluster.wait_for(lambda: worker.watchers and worker.watchers[0] is not before)


def test_the_document_of_the_fleet_says_what_the_watches_tell(watching: Watching) -> None:
    cluster, watches = watching.cluster, watching.watches
    router = cluster.router
    view = FleetView([router.fleet], watches, router.dispatcher.selector.breakers)
    one = f"{100:016x}"

    async def state() -> Any:
        return at_once(view.state())

    before = cluster.call(state())
    assert (before["router"], before["model"], before["problem"]) == (f"{7:016x}", "tiny", None)
    assert (before["unpaired"], list(before["workers"])) == ({}, [one, f"{101:016x}"])
    assert (before["workers"][one]["role"], before["workers"][one]["retractions"]) == ("prefill", None)
    watching.start()
    cluster.wait_until(lambda: watches.status(100))
    watching.tell(cluster.workers[0], WorkerNews(status=WorkerStatus(open_rooms=9, retractions=4)))
    cluster.wait_until(lambda: open_rooms(watches) == 9)
    assert cluster.call(state())["workers"][one]["retractions"] == 4
