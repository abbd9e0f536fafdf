"""Builds a router out of its parts, layer by layer: the fleet, a pipeline a model over it, and the servers in front."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from starlette.types import ASGIApp

from diptych.common.build_info import register_certificate_expiry
from diptych.common.draining import Draining
from diptych.common.members.roles import LegKind
from diptych.common.net.http_server import HttpServer
from diptych.common.trust.trust import Trust
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.admission.session_desk import Desk, ModelDesk, SessionDesk
from diptych.router.admission.session_door import SessionDoor
from diptych.router.admission.session_line import share_of
from diptych.router.choose.pairing import TEXT_KINDS, VECTOR_KINDS
from diptych.router.config import RouterConfig
from diptych.router.grpc.inference import INFERENCE, InferenceService
from diptych.router.grpc.server import CallGate, GrpcServer, MessageReader
from diptych.router.http.exchange.app import clients_app, operators_app
from diptych.router.http.operate.about import with_all_metrics
from diptych.router.keys.caller import Callers
from diptych.router.keys.ledger import Ledger
from diptych.router.keys.opened import open_callers
from diptych.router.metrics import KeyUsage, RouterMetrics, SessionLineUsage, TokenizerUsage
from diptych.router.model_wiring import ServedParts, SharedParts, reserved_names, served_parts, shared_parts
from diptych.router.process.health import ProcessMetrics, RouterHealth
from diptych.router.process.session_link import PoolsOfModel
from diptych.router.process.share import Share
from diptych.router.serve.execution import Dispatcher
from diptych.router.serve.models import Models
from diptych.router.serve.prepare import Preparer
from diptych.router.tracing.tracer import OpenExport, Tracer
from diptych.router.values.request import ServedModel
from diptych.router.workers.drain import DrainableApp, OpenRequests, RouterDrain
from diptych.router.workers.fleet import AnyOf, Fleet, Membership
from diptych.router.workers.reconciler import Reconciler

if TYPE_CHECKING:  # of what most routers have not
    from diptych.router.batches.batches import Batches
    from diptych.router.console.console import Console

MAX_CONNECTIONS: Final = 8192  # of HTTP; of gRPC as many
MAX_CONNECTION_S: Final = 60.0  # of gRPC, before a client is told to connect anew
MIN_CONNECTION_S: Final = 1.0
BODIES_IN_MEMORY: Final = 64  # of the longest; of shorter ones more
STOP_GRACE_S: Final = 3  # after draining, for the last words to running requests

FollowDesk: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Serving:
    """What answers requests, whichever port they come by."""

    served: Sequence[ServedParts]  # one at least
    shared: SharedParts
    models: Models
    health: RouterHealth
    desk: Desk
    follow_desk: FollowDesk  # keeps the desk in step with the pools, until cancelled
    callers: Callers | None  # None: nobody needs a key
    batches: Batches | None  # None: there is no store for them
    tracer: Tracer
    budget: BodyBudget

    @property
    def fleet(self) -> Fleet:
        """The first model's, which keeps the sessions of all."""
        return self.served[0].fleet

    def leave(self) -> None:
        """Work on no more batches, and let nobody wait in a line of sessions."""
        if self.batches is not None:
            self.batches.runner.leave()
        self.desk.leave()

    async def close(self) -> None:
        """End threads and files. No request may run any more."""
        for each in self.served:
            each.preparer.close()
        if self.batches is not None:
            self.batches.store.close()
        await self.tracer.close()
        for log in (self.shared.request_log, self.shared.usage):
            if log is not None:
                log.close()


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that its life is about."""

    serving: Serving
    draining: Draining
    http: HttpServer
    grpc: GrpcServer
    console: Console | None  # None: it is off
    reconciler: Reconciler

    @property
    def fleet(self) -> Fleet:
        """The first model's, which keeps the sessions of all."""
        return self.serving.fleet

    @property
    def dispatcher(self) -> Dispatcher:
        """The first model's."""
        return self.serving.served[0].dispatcher

    @property
    def preparer(self) -> Preparer:
        """The first model's."""
        return self.serving.served[0].preparer


def build(
    config: RouterConfig,
    trust: Trust,
    models: Sequence[ServedModel],
    membership: Membership,
    router_id: int,
    on_leaving: Callable[[], None] = lambda: None,
    share: Share | None = None,
    open_export: OpenExport | None = None,
) -> Router:
    """Wire a router of one model at least, or one of its processes, as an instance.

    Its ports are bound, but nothing runs yet.
    """
    metrics = RouterMetrics(config.tiers)
    register_certificate_expiry(metrics.registry, trust.tls)
    fleets = _fleets(models, membership, trust, metrics, router_id)
    shared = shared_parts(config, metrics)
    serving = _serving(config, trust, models, fleets, shared, share, _tracer(config, router_id, open_export))
    app, console = _clients(config, trust, serving, share)

    def leave() -> None:
        serving.health.drain()
        if console is not None:
            console.close()
        serving.leave()
        on_leaving()

    async def leave_shared_ports() -> None:
        if share is not None:
            http.leave_shared_port()
            await grpc.stop(STOP_GRACE_S)

    draining = Draining(OpenRequests(serving.shared.admission, serving.fleet, leave_shared_ports), leave)
    reconciler = Reconciler(serving.fleet, serving.served[0].adapters, config.declared_file, time.monotonic)
    drainable = DrainableApp(app, draining, _operators(config, trust, serving, draining, reconciler))
    http, grpc = _http(config, drainable, share), _grpc(config, serving, share)
    return Router(serving, draining, http, grpc, console, reconciler)


# what answers requests


def _fleets(
    models: Sequence[ServedModel], membership: Membership, trust: Trust, metrics: RouterMetrics, router_id: int
) -> Sequence[Fleet]:
    """Return the fleet of each model."""
    first, *others = models
    fleet = Fleet(membership, trust, first.model_id, metrics, router_id, _kinds(first))
    return [fleet, *(fleet.beside(each.model_id, _kinds(each)) for each in others)]


def _kinds(model: ServedModel) -> Sequence[LegKind]:
    return TEXT_KINDS if model.pooling is None else VECTOR_KINDS


def _serving(
    config: RouterConfig,
    trust: Trust,
    models: Sequence[ServedModel],
    fleets: Sequence[Fleet],
    shared: SharedParts,
    share: Share | None,
    tracer: Tracer,
) -> Serving:
    metrics = shared.metrics
    health = RouterHealth(AnyOf(fleets))
    metrics.watch(fleets[0], shared.admission)
    desk, follow_desk = _desk(fleets, share)
    desks = [ModelDesk(desk, number) for number in range(len(models))]
    reserved = reserved_names(config.served_model_name, models)
    served = [served_parts(config, trust, *each, shared, reserved) for each in zip(models, fleets, desks, strict=True)]
    metrics.registry.register(TokenizerUsage([each.preparer.tokenization.cache for each in served]))
    pipelines = Models([each.pipeline for each in served], desk)
    metrics.registry.register(SessionLineUsage(desk))
    callers = _callers(config, metrics, share)
    batches = _batches(config, served, pipelines, shared, callers) if config.batch_store else None
    budget = BodyBudget(BODIES_IN_MEMORY * config.max_body_bytes)
    return Serving(served, shared, pipelines, health, desk, follow_desk, callers, batches, tracer, budget)


def _desk(fleets: Sequence[Fleet], share: Share | None) -> tuple[Desk, FollowDesk]:
    """Return the desk of this process, or the way to that of the parent."""
    pools = [_pools(each) for each in fleets]
    if share is not None:
        link = share.session_link(pools)
        return link, link.run
    desk = SessionDesk([SessionDoor(each.capacity, each.problem) for each in pools], time.monotonic)
    return desk, partial(desk.follow_pools, fleets[0].wait_for_change)


def _pools(fleet: Fleet) -> PoolsOfModel:
    return PoolsOfModel(
        lambda: share_of(fleet.pairs(), fleet.pool_tokens(), fleet.routers(), fleet.router_id),
        fleet.problem,
        fleet.wait_for_change,
    )


def _callers(config: RouterConfig, metrics: RouterMetrics, share: Share | None) -> Callers | None:
    callers = open_callers(config, new_ledger=share.ledger if share else Ledger)
    if callers:
        metrics.registry.register(KeyUsage(callers))
    return callers


def _batches(
    config: RouterConfig,
    served: Sequence[ServedParts],
    models: Models,
    shared: SharedParts,
    callers: Callers | None,
) -> Batches:
    from diptych.router.batches_wiring import Watched, new_batches
    from diptych.router.http.openai.batch_lines import LineServer

    watched = [Watched(each.fleet, each.in_flight) for each in served]
    return new_batches(config, models, watched, shared.admission, LineServer(models, callers).serve, shared.metrics)


def _tracer(config: RouterConfig, router_id: int, open_export: OpenExport | None) -> Tracer:
    if open_export is None:
        return Tracer(num_processes=config.workers)
    attributes = {"service.instance.id": f"{router_id:016x}", "k8s.pod.name": config.pod_name}
    return Tracer(open_export({name: value for name, value in attributes.items() if value}))


# the servers in front of it


def _clients(
    config: RouterConfig, trust: Trust, serving: Serving, share: Share | None
) -> tuple[ASGIApp, Console | None]:
    """Return what clients see, and the console in it."""
    admins = {each.pipeline: each.adapters for each in serving.served}
    probes, callers, tracer = serving.health.probes, serving.callers, serving.tracer
    app = clients_app(config, trust, admins, serving.models, probes, callers, tracer, serving.budget, serving.batches)
    if share is not None and config.open_metrics:
        app = with_all_metrics(app, serving.shared.metrics, ProcessMetrics(config.host, share.ports), share)
    if config.console != "on":
        return app, None
    from diptych.router.console_wiring import ConsoleParts, add_console  # a router without it imports nothing of it

    first, fleets, admission = serving.served[0], [each.fleet for each in serving.served], serving.shared.admission
    model, dispatcher, admin = first.model, first.dispatcher, first.adapters
    parts = ConsoleParts(
        config, trust, model, fleets, admission, dispatcher, tracer, callers, serving.budget, admin, share
    )
    return add_console(app, parts)


def _operators(
    config: RouterConfig, trust: Trust, serving: Serving, draining: Draining, reconciler: Reconciler
) -> ASGIApp:
    fleet = serving.fleet
    drain = RouterDrain(draining, f"{fleet.router_id:016x}", config.drain_s)
    return operators_app(config, trust, fleet, serving.models, drain, reconciler, serving.callers, serving.budget)


def _http(config: RouterConfig, app: DrainableApp, share: Share | None) -> HttpServer:
    grace_s = math.ceil(config.drain_s) + STOP_GRACE_S
    own_port = share.own_port if share else None
    return HttpServer(
        app,
        config.host,
        config.http_port,
        stop_grace_s=grace_s,
        stall_s=config.client_stall_s,
        max_connections=MAX_CONNECTIONS,
        own_port=own_port,
    )


def _grpc(config: RouterConfig, serving: Serving, share: Share | None) -> GrpcServer:
    callers, stall_s = serving.callers, config.client_stall_s
    return GrpcServer(
        InferenceService(serving.models, callers, serving.tracer, stall_s=stall_s),
        CallGate(callers, serving.budget, MessageReader(INFERENCE), stall_s=stall_s),
        serving.health.probes,
        config.host,
        config.grpc_port,
        max_message_bytes=config.max_body_bytes,
        max_connection_s=_max_connection_s(config.drain_s),
        max_connections=MAX_CONNECTIONS,
        shared=share is not None,
    )


def _max_connection_s(drain_s: float) -> float:
    """All connections shall have moved, and their last calls have time to end, before a drain's deadline."""
    return min(MAX_CONNECTION_S, max(MIN_CONNECTION_S, drain_s / 3))
