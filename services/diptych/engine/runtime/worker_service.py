"""The gRPC service of a worker: relays batches between router sessions and the scheduler. It decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from diptych.engine.runtime.scheduler_client import SchedulerClient
from diptych.engine.runtime.sessions import Session as RouterSession
from diptych.engine.runtime.sessions import Sessions
from diptych.v1 import bootstrap_pb2, engine_pb2, worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Implements `diptych.v1.Worker` over one scheduler."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        describe: Callable[[], bootstrap_pb2.Instance],
        on_load: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._describe = describe
        self._on_load = on_load  # called when the links changed
        self._sessions = Sessions()
        self._queries = itertools.count(1)
        self._answers: dict[int, asyncio.Future[worker_pb2.WorkerStatus]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def load(self) -> bootstrap_pb2.WorkerLoad:
        return self._sessions.load

    async def relay(self) -> None:
        """Pass on what the scheduler says, for ever. Raises `SchedulerDied`."""
        async for events in self._scheduler.events():
            self._sessions.deliver(events.outputs)
            if events.HasField("load"):
                self._take_load(events.load)
            self._answer_status(events)
            if self._sessions.num_open_rooms == 0:
                self._empty.set()

    async def wait_until_empty(self) -> None:
        """Wait until every started leg has ended."""
        await self._empty.wait()

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterBatch],
        context: grpc.aio.ServicerContext[worker_pb2.RouterBatch, worker_pb2.WorkerBatch],
    ) -> AsyncIterator[worker_pb2.WorkerBatch]:
        session = self._sessions.open()
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            while not reader.done():
                take = asyncio.ensure_future(session.take())
                await asyncio.wait((take, reader), return_when=asyncio.FIRST_COMPLETED)
                if take.done():
                    yield take.result()
                else:
                    take.cancel()
            await reader
        finally:
            reader.cancel()
            await self._abandon(session)

    async def GetStatus(
        self,
        request: worker_pb2.StatusRequest,
        context: grpc.aio.ServicerContext[worker_pb2.StatusRequest, worker_pb2.WorkerStatus],
    ) -> worker_pb2.WorkerStatus:
        query = next(self._queries)
        answer: asyncio.Future[worker_pb2.WorkerStatus] = asyncio.get_running_loop().create_future()
        self._answers[query] = answer
        try:
            await self._scheduler.send(engine_pb2.SchedulerCommands(status_query=query))
            status = await answer
        finally:
            self._answers.pop(query, None)
        status.instance.CopyFrom(self._describe())
        return status

    async def _read(self, session: RouterSession, batches: AsyncIterator[worker_pb2.RouterBatch]) -> None:
        async for batch in batches:
            accepted = self._sessions.start(session, batch.start)
            if accepted:
                self._empty.clear()
            abort = self._sessions.owned(session, batch.abort)
            if accepted or abort:
                await self._scheduler.send(engine_pb2.SchedulerCommands(start=accepted, abort=abort))

    async def _abandon(self, session: RouterSession) -> None:
        """The router is gone: nobody wants its rooms."""
        rooms = self._sessions.close(session)
        if rooms:
            logger.info("a router session ended with %d open rooms: aborting them", len(rooms))
            await self._scheduler.send(engine_pb2.SchedulerCommands(abort=rooms))
        if self._sessions.num_open_rooms == 0:
            self._empty.set()

    def _answer_status(self, events: engine_pb2.SchedulerEvents) -> None:
        for query in events.status_answers:
            answer = self._answers.pop(query, None)
            if answer is not None and not answer.done():
                answer.set_result(events.status)

    def _take_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        links_changed = load.linked_instances != self.load.linked_instances
        self._sessions.set_load(load)
        if links_changed:
            self._on_load()
