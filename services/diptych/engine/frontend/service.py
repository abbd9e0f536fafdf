"""The gRPC service of a worker: finds the instance that a call means, and passes the call on to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message

from diptych.common.errors import Overloaded
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.health import SchedulerSilent
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.v1 import worker_pb2, worker_pb2_grpc

_NOBODY: Final = "0" * 16

Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Implements `diptych.v1.Worker` over the living groups of a worker."""

    def __init__(self, groups: Iterable[WorkerGroup]) -> None:
        self._groups = {name_of(group.instance_id): group for group in groups}

    def groups(self) -> list[WorkerGroup]:
        """Return those that live."""
        return list(self._groups.values())

    @property
    def num_open_rooms(self) -> int:
        return sum(group.num_open_rooms for group in self._groups.values())

    def forget(self, group: WorkerGroup) -> int:
        """Serve a group no more that has died or left; return how many are left. Idempotent."""
        self._groups.pop(name_of(group.instance_id), None)
        return len(self._groups)

    def leave(self, group: WorkerGroup) -> None:
        """Nobody will answer for a group that has drained: the last one is served until the worker ends."""
        if len(self._groups) > 1:
            self.forget(group)

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.RouterBatch], context: Context
    ) -> AsyncIterator[worker_pb2.WorkerBatch]:
        group = await self.find(_named(context), context)
        async with _refusing(context), aclosing(group.session(request_iterator)) as batches:
            async for batch in batches:
                yield batch

    async def GetStatus(self, request: worker_pb2.StatusRequest, context: Context) -> worker_pb2.WorkerStatus:
        group = await self.find(name_of(request.instance_id), context)
        try:
            return await group.status()
        except (SchedulerDied, SchedulerSilent) as end:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, str(end))

    async def Watch(
        self, request: worker_pb2.WatchWorkerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerNews]:
        group = await self.find(name_of(request.instance_id), context)
        async with _refusing(context), aclosing(group.watch(request.interval_ms / 1e3)) as told:
            async for news in told:
                yield news

    async def find(self, name: str, context: Context) -> WorkerGroup:
        """Return the group of that name; end the call if there is none."""
        if name == _NOBODY and len(self._groups) == 1:
            return next(iter(self._groups.values()))
        group = self._groups.get(name)
        if group is None:
            here = ", ".join(self._groups) or "none"
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"no instance {name} here; there is: {here}")
        return group


@asynccontextmanager
async def _refusing(context: Context) -> AsyncGenerator[None, None]:
    """End the call as a group's messages end."""
    try:
        yield
    except (SchedulerDied, SchedulerSilent) as end:
        await refuse(context, grpc.StatusCode.UNAVAILABLE, str(end))
    except Overloaded as error:
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))


def name_of(instance_id: int) -> str:
    return f"{instance_id:016x}"


async def refuse(context: Context, code: grpc.StatusCode, words: str) -> NoReturn:
    await context.abort(code, words)
    raise asyncio.CancelledError  # not reached: abort raises


def _named(context: Context) -> str:
    """Return which instance a call's metadata names."""
    return str(dict(context.invocation_metadata() or ()).get("diptych-instance", _NOBODY))
