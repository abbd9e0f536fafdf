"""The frontend process of a worker: wires scheduler, gRPC service and membership together, and runs them.

Ends with the scheduler, whoever dies first: half a worker must not look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

import grpc

from diptych.common import lifecycle, rpc
from diptych.common.logging import setup
from diptych.common.membership_client import Evicted, MembershipWatcher, Registration
from diptych.engine.loader.source import open_model
from diptych.engine.runtime.scheduler_client import (
    SchedulerClient,
    SchedulerDied,
    ipc_endpoint,
    new_folder,
    start_scheduler,
)
from diptych.engine.runtime.scheduler_config import SchedulerConfig
from diptych.engine.runtime.worker_config import WorkerConfig
from diptych.engine.runtime.worker_service import WorkerService
from diptych.v1 import bootstrap_pb2, engine_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

_PEER_ROLE: Mapping[int, int] = {
    bootstrap_pb2.ROLE_PREFILL: bootstrap_pb2.ROLE_DECODE,
    bootstrap_pb2.ROLE_DECODE: bootstrap_pb2.ROLE_PREFILL,
}


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """What differs between a prefill and a decode worker outside the scheduler."""

    name: str  # "prefill"
    role: bootstrap_pb2.Role
    scheduler_module: str


@dataclass(slots=True)
class _Record:
    """The worker's own membership record."""

    instance: bootstrap_pb2.Instance
    service: WorkerService | None = field(default=None)

    def describe(self) -> bootstrap_pb2.Instance:
        if self.service is not None:
            self.instance.load.CopyFrom(self.service.load)
        return self.instance


def run_worker(config: WorkerConfig, role: WorkerRole) -> int:
    """Run a worker until SIGTERM or until its scheduler ends; return the exit code."""
    setup(role.name, config.log_format, config.log_level)
    try:
        asyncio.run(lifecycle.run_until_signal(lambda stop: _serve(config, role, stop), grace_s=config.drain_s + 10))
    except ExceptionGroup as group:
        ends, others = group.split((SchedulerDied, Evicted))
        if ends is None or others is not None:
            raise
        logger.error("%s", ends.exceptions[0])
        return 1
    return 0


async def _serve(config: WorkerConfig, role: WorkerRole, stop: asyncio.Event) -> None:
    record = _Record(_instance(config, role))
    folder = new_folder()
    scheduler = await start_scheduler(role.scheduler_module, _scheduler_config(config, role, record, folder), folder)
    registration = Registration(config.bootstrap, record.describe)
    watcher = MembershipWatcher(config.bootstrap)
    service = record.service = WorkerService(scheduler, record.describe, registration.nudge)
    server, port = await _listen(config, service)
    record.instance.address = f"{config.advertised_host}:{port}"
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(registration.run()), tasks.create_task(watcher.run())]
            await _become_ready(scheduler, record, registration, stop)
            background.append(tasks.create_task(service.relay()))
            background.append(tasks.create_task(_follow_peers(watcher, scheduler, record)))
            await stop.wait()
            await _drain(service, record, registration, config.drain_s)
            for task in background:
                task.cancel()
    finally:
        await server.stop(grace=1)
        await scheduler.stop()


async def _become_ready(
    scheduler: SchedulerClient, record: _Record, registration: Registration, stop: asyncio.Event
) -> None:
    """Wait until the model is loaded, then tell bootstrap how to reach us; return early when told to stop."""
    loading = asyncio.ensure_future(scheduler.ready())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        loading.cancel()
        return
    _note_ready(record.instance, loading.result())
    registration.nudge()
    logger.info("serving at %s as %016x", record.instance.address, record.instance.instance_id)


def _note_ready(instance: bootstrap_pb2.Instance, ready: engine_pb2.SchedulerReady) -> None:
    instance.state = bootstrap_pb2.INSTANCE_STATE_READY
    instance.compat = ready.compat
    instance.context_len = ready.context_len
    instance.transfer.CopyFrom(ready.transfer)


async def _follow_peers(watcher: MembershipWatcher, scheduler: SchedulerClient, record: _Record) -> None:
    """Tell the scheduler the whole set of its peers, each time it changed."""
    changed = asyncio.Event()
    changed.set()
    watcher.add_listener(changed.set)
    known: dict[int, bytes] = {}
    while True:
        await changed.wait()
        changed.clear()
        peers = [i for i in watcher.instances().values() if _is_peer(i, record.instance)]
        members = {i.instance_id: i.transfer.engine_metadata for i in peers}
        if members != known:
            known = members
            await scheduler.send(engine_pb2.SchedulerCommands(peers=engine_pb2.PeerView(instances=peers)))


def _is_peer(other: bootstrap_pb2.Instance, ours: bootstrap_pb2.Instance) -> bool:
    reachable = other.state in (bootstrap_pb2.INSTANCE_STATE_READY, bootstrap_pb2.INSTANCE_STATE_DRAINING)
    return reachable and other.role == _PEER_ROLE[ours.role] and other.compat == ours.compat


async def _drain(service: WorkerService, record: _Record, registration: Registration, drain_s: int) -> None:
    """Take nothing new, and give what runs time to finish."""
    record.instance.state = bootstrap_pb2.INSTANCE_STATE_DRAINING
    registration.nudge()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await service.wait_until_empty()


async def _listen(config: WorkerConfig, service: WorkerService) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    port = rpc.listen(server, config.host, config.port)
    await server.start()
    return server, port


def _instance(config: WorkerConfig, role: WorkerRole) -> bootstrap_pb2.Instance:
    return bootstrap_pb2.Instance(
        instance_id=secrets.randbits(64) or 1,
        role=role.role,
        model_id=open_model(config.model).config.model_id,
        state=bootstrap_pb2.INSTANCE_STATE_STARTING,
        version=version("diptych"),
    )


def _scheduler_config(config: WorkerConfig, role: WorkerRole, record: _Record, folder: str) -> SchedulerConfig:
    return SchedulerConfig(
        component=role.name,
        log_format=config.log_format,
        log_level=config.log_level,
        endpoint=ipc_endpoint(folder),
        parent_pid=os.getpid(),
        instance_id=record.instance.instance_id,
        transports=config.transports,
        engine=config.engine_options,
    )
