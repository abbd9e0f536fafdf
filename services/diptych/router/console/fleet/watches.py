"""Watches all workers while somebody looks: a stream of news from each that this router has a session with.

Rule: level-triggered. Whenever the fleet changes, or looking begins or ends, the streams are compared with the workers
that should have one, so none is left over and none is missing. A worker that does not tell (an older one) is asked
again now and then; what is known of it is then what everybody is told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import grpc

from diptych.common.event_loop import raise_if_cancelled
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import Trust
from diptych.router.console.fleet.link_rates import LinkRates
from diptych.router.console.fleet.step_history import StepHistory
from diptych.router.console.state import StepRate, Steps
from diptych.router.workers.session import Session
from diptych.v1.worker_pb2 import LinkStatus, WatchWorkerRequest, WorkerNews, WorkerStatus
from diptych.v1.worker_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

NEWS_A_SECOND: Final = 8  # of all workers together: each costs this router some 0.3 ms, most of it in gRPC
BEGIN_S: Final = 4e-3  # between two streams that begin: each takes 0.1 ms, and its first word 0.2
RETRY_S: Final = 2.0
OLDER_RETRY_S: Final = 30.0  # of a worker that knows no such call


class Watched(Protocol):
    """The workers, as sessions to them."""

    def sessions(self) -> Sequence[Session]: ...

    async def wait_for_change(self) -> None: ...


class Watches:
    """The streams, and what came by them. `run` must be running; nothing is asked before `start`."""

    def __init__(self, fleet: Watched, trust: Trust, clock: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._trust = trust
        self._clock = clock  # seconds since 1970
        self._is_wanted = False
        self._switched = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._statuses: dict[int, WorkerStatus] = {}
        self._heard: set[int] = set()  # who has told of itself, or can't
        self._is_heard = asyncio.Event()  # one more of those: another event from then on
        self._links: dict[int, Sequence[LinkStatus]] = {}
        self._history = StepHistory()
        self._link_rates = LinkRates()

    def start(self) -> None:
        """Watch from now on. Idempotent."""
        self._switch(True)

    def stop(self) -> None:
        """Watch no more. What the steps were stays for its time. Idempotent."""
        self._switch(False)

    def _switch(self, is_wanted: bool) -> None:
        if self._is_wanted is not is_wanted:
            self._is_wanted = is_wanted
            self._switched.set()

    # what is known

    def status(self, instance_id: int) -> WorkerStatus | None:
        """Return a worker's newest word of itself, which may lack its links; None: it has not told."""
        return self._statuses.get(instance_id)

    def links(self, instance_id: int) -> Sequence[LinkStatus]:
        """Return a worker's newest word of its links: another object when there is a newer one."""
        return self._links.get(instance_id, ())

    def rate(self, instance_id: int) -> StepRate | None:
        """Return what a worker's steps did in the last seconds; None: it has not been watched for long enough."""
        return self._history.rate(instance_id, self._clock())

    def link_rates(self, instance_id: int) -> Mapping[int, float]:
        """Return how many bytes/s went to which peers of late. Peers to whom none went are left out."""
        return self._link_rates.of(instance_id)

    def steps_since(self, cursor: int) -> tuple[int, Steps]:
        """Return steps from a cursor on (0: all of the last minutes), and the cursor to go on with.

        Some hundreds at once, so that nobody waits: whoever wants all asks until the cursor stays as it is.
        """
        return self._history.since(cursor)

    @property
    def steps_end(self) -> int:
        """The cursor of who has all steps."""
        return self._history.end

    async def wait_for_statuses(self, timeout_s: float) -> None:
        """Wait until all workers with a session have told of themselves, once `start` is called; no longer than so."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(each.is_open and each.instance_id not in self._heard for each in self._fleet.sessions()):
                    await self._is_heard.wait()
        except TimeoutError:
            logger.debug("workers did not tell of themselves within %g s", timeout_s)

    # the streams

    async def run(self) -> None:
        """Keep the streams as they should be, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._switched.clear()
                changed = asyncio.ensure_future(self._fleet.wait_for_change())
                switched = asyncio.ensure_future(self._switched.wait())
                try:
                    await asyncio.sleep(0)  # from here on both wait: no change is missed
                    self._reconcile(group)
                    ends = (changed, switched) if self._is_wanted else (switched,)
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                    switched.cancel()

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        sessions = self._fleet.sessions() if self._is_wanted else ()
        wanted = {session.instance_id: session for session in sessions if session.is_open}
        for instance_id in self._tasks.keys() - wanted.keys():
            self._tasks.pop(instance_id).cancel()
            self._forget(instance_id)
        for number, instance_id in enumerate(wanted.keys() - self._tasks.keys()):
            address = wanted[instance_id].worker.record.address
            self._tasks[instance_id] = group.create_task(self._follow(instance_id, address, number * BEGIN_S))

    async def _follow(self, instance_id: int, address: str, begin_s: float) -> None:
        """Watch one worker, by one stream after the other, until cancelled."""
        await asyncio.sleep(begin_s)
        while True:
            retry_s = RETRY_S
            try:
                await self._watch(instance_id, address)
            except grpc.aio.AioRpcError as error:
                logger.debug("worker %016x is not watched: %s", instance_id, error.details())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    retry_s = OLDER_RETRY_S
            except Exception:  # a malformed message must cost this stream, not the router
                logger.exception("watching worker %016x failed", instance_id)
            raise_if_cancelled()
            self._forget(instance_id)
            self._hear(instance_id)
            await asyncio.sleep(retry_s)

    async def _watch(self, instance_id: int, address: str) -> None:
        async with open_channel(address, self._trust) as channel:
            interval_ms = round(1e3 * len(self._tasks) / NEWS_A_SECOND)
            request = WatchWorkerRequest(instance_id=instance_id, interval_ms=interval_ms)
            async for news in WorkerStub(channel).Watch(request):
                self._receive(instance_id, news)

    def _receive(self, instance_id: int, news: WorkerNews) -> None:
        if instance_id not in self._tasks:
            return  # a last word, after `stop`
        now_s = self._clock()
        if news.HasField("status"):
            self._statuses[instance_id] = news.status
            self._hear(instance_id)
        if news.has_links:
            self._links[instance_id] = news.status.links
            self._link_rates.add(instance_id, news.status.links, now_s)
        self._history.add(instance_id, news.steps, now_s)

    def _hear(self, instance_id: int) -> None:
        if instance_id not in self._heard:
            self._heard.add(instance_id)
            self._is_heard.set()
            self._is_heard = asyncio.Event()

    def _forget(self, instance_id: int) -> None:
        """Nothing is known any more but what its steps were."""
        self._statuses.pop(instance_id, None)
        self._heard.discard(instance_id)
        self._links.pop(instance_id, None)
        self._link_rates.forget(instance_id)
        self._history.forget(instance_id)
