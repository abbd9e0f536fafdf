"""The frontend process of a worker: wires schedulers, gRPC service and membership together, and runs them.

Each scheduler group is an instance of its own. One that dies leaves the membership while the others go on; with the
last one the worker ends: half a worker must not look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import grpc

from diptych.common import lifecycle, rpc
from diptych.common.http_server import HttpServer
from diptych.common.logging import setup
from diptych.common.membership_client import Evicted, MembershipWatcher, Registration
from diptych.engine.kv_feed import KvFeeds
from diptych.engine.loader.source import open_model
from diptych.engine.runtime.metrics_app import metrics_app
from diptych.engine.runtime.scheduler_client import SchedulerDied, ipc_endpoint, new_folder, start_scheduler
from diptych.engine.runtime.scheduler_config import SchedulerConfig
from diptych.engine.runtime.sessions import Sessions
from diptych.engine.runtime.worker_admin import WorkerAdminService
from diptych.engine.runtime.worker_config import WorkerConfig
from diptych.engine.runtime.worker_group import WorkerGroup
from diptych.engine.runtime.worker_metrics import WorkerMetrics
from diptych.engine.runtime.worker_service import WorkerService
from diptych.v1 import admin_pb2_grpc, bootstrap_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

SCRAPE_GRACE_S: Final = 1  # for a scrape that runs when the worker ends


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """What differs between a prefill and a decode worker outside the scheduler."""

    name: str  # "prefill"
    role: bootstrap_pb2.Role
    scheduler_module: str


def run_worker(config: WorkerConfig, role: WorkerRole) -> int:
    """Run a worker until SIGTERM or until its last scheduler ends; return the exit code."""
    setup(role.name, config.log_format, config.log_level)
    try:
        asyncio.run(lifecycle.run_until_signal(lambda stop: _serve(config, role, stop), grace_s=config.drain_s + 10))
    except ExceptionGroup as group:
        ends, others = group.split((SchedulerDied, Evicted))
        if ends is None or others is not None:
            raise
        logger.error("%s", _first_leaf(ends))
        return 1
    return 0


async def _serve(config: WorkerConfig, role: WorkerRole, stop: asyncio.Event) -> None:
    metrics = WorkerMetrics()
    async with contextlib.AsyncExitStack() as stack:
        starting = [_member(config, role, rank, metrics) for rank in range(config.dp)]
        members = [await stack.enter_async_context(each) for each in starting]
        service = WorkerService(member.group for member in members)
        address = await stack.enter_async_context(_listen(config, service))
        scraped = HttpServer(
            metrics_app(metrics, service.groups), config.host, config.metrics_port, stop_grace_s=SCRAPE_GRACE_S
        )
        watcher = MembershipWatcher(config.bootstrap)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watcher.run())
            tasks.create_task(scraped.run())
            async with asyncio.TaskGroup() as lives:
                for member in members:
                    member.group.listen_at(address, f"{config.advertised_host}:{scraped.port}")
                    lives.create_task(_live(member, service, watcher, stop, config))
            scraped.stop()
            watching.cancel()


@dataclass(frozen=True, slots=True)
class _Member:
    """A scheduler group and its place in the membership."""

    group: WorkerGroup
    registration: Registration


async def _live(
    member: _Member, service: WorkerService, watcher: MembershipWatcher, stop: asyncio.Event, config: WorkerConfig
) -> None:
    """Serve one group until `stop`, or until it dies and others are left. Raises if it dies alone, or early."""
    group = member.group
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(member.registration.run())]
            if await _until_stopped(group.load(config.kv_require), stop):
                background.append(tasks.create_task(group.relay()))
                background.append(tasks.create_task(group.pulse.run()))
                background.append(tasks.create_task(group.follow_peers(watcher)))
                await stop.wait()
                await group.drain(config.drain_s)
            for task in background:
                task.cancel()
    except* SchedulerDied as deaths:
        if service.forget(group) == 0 or not group.is_loaded:
            raise
        logger.error("instance %s died; the others here go on: %s", group, _first_leaf(deaths))
        await group.scheduler.stop()


async def _until_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Return True when `work` is done; False, having cancelled it, when `stop` comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        stopping.cancel()
        working.cancel()


@contextlib.asynccontextmanager
async def _member(config: WorkerConfig, role: WorkerRole, rank: int, metrics: WorkerMetrics) -> AsyncIterator[_Member]:
    """Start the scheduler of a group; end it at the exit."""
    instance, folder = _instance(config, role, rank), new_folder()
    scheduler_config = _scheduler_config(config, role, instance.instance_id, folder)
    scheduler = await start_scheduler(role.scheduler_module, scheduler_config, folder)
    registration = Registration(config.bootstrap, lambda: group.describe())
    sessions = Sessions(KvFeeds() if config.kv_events == "on" else None, metrics.leg_ended)
    group = WorkerGroup(scheduler, instance, sessions, registration.nudge, config.stall_s)
    try:
        yield _Member(group, registration)
    finally:
        await scheduler.stop()


@contextlib.asynccontextmanager
async def _listen(config: WorkerConfig, service: WorkerService) -> AsyncIterator[str]:
    """Serve gRPC until the exit; yield the address that others reach us by."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    admin_pb2_grpc.add_WorkerAdminServicer_to_server(WorkerAdminService(service), server)
    port = rpc.listen(server, config.host, config.port)
    await server.start()
    try:
        yield f"{config.advertised_host}:{port}"
    finally:
        await server.stop(grace=1)


def _instance(config: WorkerConfig, role: WorkerRole, rank: int) -> bootstrap_pb2.Instance:
    model_id = open_model(config.model, config.load_format).config.model_id
    return bootstrap_pb2.Instance(
        instance_id=secrets.randbits(64) or 1,
        role=role.role,
        model_id=model_id,
        started_as=model_id,
        state=bootstrap_pb2.INSTANCE_STATE_STARTING,
        version=version("diptych"),
        dp_rank=rank,
    )


def _scheduler_config(config: WorkerConfig, role: WorkerRole, instance_id: int, folder: str) -> SchedulerConfig:
    return SchedulerConfig(
        component=role.name,
        log_format=config.log_format,
        log_level=config.log_level,
        endpoint=ipc_endpoint(folder),
        parent_pid=os.getpid(),
        instance_id=instance_id,
        transports=config.transports,
        kv_backend=config.kv_backend,
        kv_path=config.kv_path,
        kv_require=config.kv_require,
        transfer=config.transfer_rules,
        engine=config.engine_options,
    )


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
