"""The frontend process of a worker: wires schedulers, gRPC service and membership together, and runs them.

Each scheduler group is an instance of its own. One that dies leaves the membership while the others go on; with the
last one the worker ends: half a worker must not look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from diptych.common import event_loop
from diptych.common.draining import drain_route
from diptych.common.garbage import search_when_idle, spare_what_stays
from diptych.common.health.grpc_health import add_health
from diptych.common.health.health import HealthServer
from diptych.common.logging import setup
from diptych.common.members.membership_client import Evicted, MembershipWatcher, Registration
from diptych.common.members.roles import Role
from diptych.common.net import descriptors, rpc
from diptych.common.net.http_server import HttpServer
from diptych.common.trust.instance_secret import InstanceSecret
from diptych.common.trust.trust import Trust, forget_token
from diptych.common.verdicts.probes import Probes
from diptych.common.version import own_version
from diptych.engine.cache.kv_feed import KvFeeds
from diptych.engine.frontend.admin import RoleChanges, WorkerAdminService, WorkerDrain, role_route
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.health import WorkerHealth
from diptych.engine.frontend.metrics import WorkerMetrics, metrics_app
from diptych.engine.frontend.scheduler_client import SchedulerDied, share_experts, start_scheduler
from diptych.engine.frontend.scheduler_start import check_role, open_served, scheduler_config
from diptych.engine.frontend.service import WorkerService
from diptych.engine.frontend.sessions import Sessions
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.engine.frontend.weights.givers import name_givers
from diptych.engine.frontend.weights.weight_routes import weight_routes
from diptych.engine.nodes.company import GroupEnded
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.tensor_parallel.sharing.places import shared_places
from diptych.tokens.tokenizer import stay_in_the_callers_thread
from diptych.v1 import admin_pb2_grpc, bootstrap_pb2, rank_pb2_grpc, worker_pb2_grpc

if TYPE_CHECKING:  # of workers on several nodes
    from diptych.checkpoints.source import ModelSource
    from diptych.engine.frontend.node_start import LeadNodes
    from diptych.engine.nodes.leading import GroupLeader

logger = logging.getLogger(__name__)

SCRAPE_GRACE_S: Final = 1  # for a scrape that runs when the worker ends


def run_worker(config: WorkerConfig, role: Role) -> int:
    """Run a worker until SIGTERM or until its last scheduler ends; return the exit code."""
    stay_in_the_callers_thread()
    setup(role.value, config.log_format, config.log_level)
    descriptors.use_all_descriptors()
    trust = config.trust()
    forget_token()  # schedulers need none
    serve = _follow if config.node_rank else _serve
    try:
        asyncio.run(event_loop.run_until_signal(lambda stop: serve(config, trust, role, stop), grace_s=config.grace_s))
    except ExceptionGroup as group:
        ends, others = group.split((SchedulerDied, Evicted, GroupEnded))
        if ends is None or others is not None:
            raise
        logger.error("%s", _first_leaf(ends))
        return 1
    return 0


async def _follow(config: WorkerConfig, trust: Trust, role: Role, stop: event_loop.Stop) -> None:
    from diptych.engine.frontend.node import follow

    await follow(config, trust, role, stop)


async def _lead(config: WorkerConfig, role: Role, source: ModelSource, stop: event_loop.Stop) -> LeadNodes | None:
    """Return what leads the other nodes of a group; None where there is one node."""
    if config.nnodes == 1:
        return None
    from diptych.engine.frontend.node_start import lead_nodes

    return await lead_nodes(config, role, source, stop)


async def _serve(config: WorkerConfig, trust: Trust, role: Role, stop: event_loop.Stop) -> None:
    source = open_served(config, role)
    metrics = WorkerMetrics(trust.tls)
    async with contextlib.AsyncExitStack() as stack:
        members = await _members(stack, config, trust, role, source, metrics, stop)
        service = WorkerService(member.group for member in members)
        ours = [member.secret for member in members]
        watcher = MembershipWatcher(config.bootstrap, trust, instances=ours, without_loads=True)
        health = WorkerHealth(lambda: [group.facts for group in service.groups()], watcher, config.stall_s)
        stack.enter_context(HealthServer(config.host, config.health_port, health.probes))
        stack.push_async_callback(_stop_all, members)  # before probes end: none fails while schedulers take their time
        drain = WorkerDrain(service.groups, config.drain_s)
        roles = RoleChanges(config.drain_s, partial(check_role, source.config, config))
        admin = WorkerAdminService(service, drain, roles)
        leader = members[0].leader
        address = await stack.enter_async_context(
            _listen(config, trust, metrics, service, admin, health.probes, leader)
        )
        if leader is not None:
            stack.enter_context(leader.ending())  # while it can be heard
        scraped = _scraped(config, trust, metrics, service, drain, roles)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(watcher.run()), tasks.create_task(health.heartbeat.run())]
            if leader is not None:
                background.append(tasks.create_task(leader.watch()))
            tasks.create_task(scraped.run())
            spare_what_stays()
            background.append(tasks.create_task(search_when_idle(lambda: not service.num_open_rooms)))
            async with asyncio.TaskGroup() as lives:
                for member in members:
                    member.group.listen_at(address, f"{config.advertised_host}:{scraped.port}")
                    lives.create_task(_live(member, service, watcher, stop, config, source.weights_id))
            scraped.stop()
            for task in background:
                task.cancel()


async def _members(
    stack: contextlib.AsyncExitStack,
    config: WorkerConfig,
    trust: Trust,
    role: Role,
    source: ModelSource,
    metrics: WorkerMetrics,
    stop: event_loop.Stop,
) -> Sequence[_Member]:
    """Start the scheduler groups of this worker, one after the other; they end with `stack`."""
    num_threads, cache_bytes = config.tokenizer_threads, config.tokenizer_cache_bytes
    prompts = TokenizerManager(source.tokenizer, num_threads=num_threads, cache_bytes=cache_bytes)
    stack.callback(prompts.close)
    model_id = source.config.model_id
    lead = await _lead(config, role, source, stop)
    places = stack.enter_context(shared_places(config))
    starting = [
        _member(config, trust, role, rank, model_id, metrics, prompts, lead, place) for rank, place in enumerate(places)
    ]
    members = [await stack.enter_async_context(each) for each in starting]
    if config.dp_attention:
        share_experts([member.group.scheduler for member in members])
    return members


def _scraped(
    config: WorkerConfig,
    trust: Trust,
    metrics: WorkerMetrics,
    service: WorkerService,
    drain: WorkerDrain,
    roles: RoleChanges,
) -> HttpServer:
    """Return the server of metrics, where operators also drain, change roles and give weights."""
    app = metrics_app(metrics, service.groups)
    app.router.routes.append(drain_route("/drain", drain, trust, metrics.refusals))
    app.router.routes.append(role_route(service, roles, trust, metrics.refusals))
    app.router.routes.extend(weight_routes(service.groups, config.drain_s, trust, metrics.refusals))
    return HttpServer(app, config.host, config.metrics_port, stop_grace_s=SCRAPE_GRACE_S)


@dataclass(frozen=True, slots=True)
class _Member:
    """A scheduler group and its place in the membership."""

    secret: InstanceSecret
    group: WorkerGroup
    registration: Registration
    leader: GroupLeader | None  # where it has ranks on other nodes


async def _live(
    member: _Member,
    service: WorkerService,
    watcher: MembershipWatcher,
    stop: event_loop.Stop,
    config: WorkerConfig,
    weights_id: str,
) -> None:
    """Serve one group until `stop`, or until it dies and others are left. Raises if it dies alone, or early."""
    group = member.group
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(member.registration.run())]
            if config.weights_from == "peers":
                background.append(tasks.create_task(name_givers(group.scheduler, watcher, member.secret, weights_id)))
            if await _until_stopped(group.load(config.kv_require), stop):
                background.append(tasks.create_task(group.relay()))
                background.append(tasks.create_task(group.liveness.run()))
                background.append(tasks.create_task(group.peers.follow(watcher)))
                background.append(tasks.create_task(group.departure.draining.run()))
                await group.departure.draining.leave_on(stop, config.drain_s, config.release_s)
                service.leave(group)
            for task in background:
                task.cancel()
    except* SchedulerDied as deaths:
        await group.scheduler.end_companions()
        if service.forget(group) == 0 or not group.is_loaded:
            raise
        logger.error("instance %s died; the others here go on: %s", group, _first_leaf(deaths))
        await group.scheduler.stop()


async def _stop_all(members: Sequence[_Member]) -> None:
    """At once, so that the time it takes does not grow with their number."""
    await asyncio.gather(*(member.group.scheduler.stop() for member in members))


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
async def _member(
    config: WorkerConfig,
    trust: Trust,
    role: Role,
    rank: int,
    model_id: str,
    metrics: WorkerMetrics,
    prompts: TokenizerManager,
    lead: LeadNodes | None,
    sharing: SharedExperts | None,
) -> AsyncIterator[_Member]:
    """Start the scheduler of a group; end it at the exit. `lead`: the nodes that it has ranks on."""
    secret = InstanceSecret.new()
    instance = _instance(config, role, rank, model_id, secret.instance_id)
    leader = lead.of(instance) if lead else None
    place = lead.place if lead else None
    scheduler = await start_scheduler(scheduler_config(config, role, instance, place, sharing), company=leader)
    registration = Registration(config.bootstrap, trust, lambda: group.describe(), secret)
    sessions = Sessions(role, KvFeeds() if config.kv_events == "on" else None, metrics.leg_ended)
    limits_s = config.stall_s, config.release_s
    group = WorkerGroup(
        scheduler,
        instance,
        sessions,
        registration.nudge,
        prompts,
        *limits_s,
        num_move_links=config.move_links,
        drain_cache_s=config.drain_cache_s,
    )
    try:
        yield _Member(secret, group, registration, leader)
    finally:
        await scheduler.stop()


@contextlib.asynccontextmanager
async def _listen(
    config: WorkerConfig,
    trust: Trust,
    metrics: WorkerMetrics,
    service: WorkerService,
    admin: WorkerAdminService,
    probes: Probes,
    leader: GroupLeader | None,
) -> AsyncIterator[str]:
    """Serve gRPC until the exit; yield the address that others reach us by."""
    server = rpc.new_server(trust, metrics.refusals, own_host=config.advertised_host)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    admin_pb2_grpc.add_WorkerAdminServicer_to_server(admin, server)
    if leader is not None:
        rank_pb2_grpc.add_NodeGroupServicer_to_server(leader, server)
    add_health(server, probes, ("diptych.v1.Worker", "diptych.v1.WorkerAdmin"))
    port = rpc.listen(server, config.host, config.own_port, trust)
    await server.start()
    try:
        yield f"{config.advertised_host}:{port}"
    finally:
        await server.stop(grace=1)


def _instance(config: WorkerConfig, role: Role, rank: int, model_id: str, instance_id: int) -> bootstrap_pb2.Instance:
    return bootstrap_pb2.Instance(
        instance_id=instance_id,
        role=role.wire,
        model_id=model_id,
        started_as=model_id,
        state=bootstrap_pb2.INSTANCE_STATE_STARTING,
        version=own_version(),
        dp_rank=rank,
        pool=config.pool,
        pod=config.pod_name,
    )


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
