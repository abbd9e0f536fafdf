"""Builds a router out of its parts, layer by layer: the fleet, a pipeline a model over it, and the servers in front."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from diptych.common.build_info import register_certificate_expiry
from diptych.common.draining import Draining
from diptych.common.members.roles import LegKind
from diptych.common.net.http_server import HttpServer
from diptych.common.trust.trust import Trust
from diptych.grammars.checks import GrammarChecks
from diptych.router.admission.admission import Admission
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.admission.in_flight import InFlight
from diptych.router.admission.queue import AdmissionLimits
from diptych.router.admission.session_desk import Desk, ModelDesk, SessionDesk
from diptych.router.admission.session_door import SessionDoor
from diptych.router.admission.session_line import share_of
from diptych.router.admission.shedder import Shedder
from diptych.router.admission.ttft_gate import TtftGate
from diptych.router.choose.breakers import Breakers
from diptych.router.choose.explain import Explanations
from diptych.router.choose.pairing import TEXT_KINDS, VECTOR_KINDS
from diptych.router.choose.policies import plan_of
from diptych.router.choose.seen_prompts import SeenPrompts
from diptych.router.config import RouterConfig
from diptych.router.grpc.inference import INFERENCE, InferenceService
from diptych.router.grpc.server import CallGate, GrpcServer, MessageReader
from diptych.router.http.exchange.app import clients_app, operators_app
from diptych.router.http.operate.about import with_all_metrics
from diptych.router.keys.caller import Callers
from diptych.router.keys.ledger import Ledger
from diptych.router.keys.opened import open_callers
from diptych.router.metrics import GrammarUsage, KeyUsage, RouterMetrics, SessionLineUsage, TokenizerUsage
from diptych.router.process.health import ProcessMetrics, RouterHealth
from diptych.router.process.session_link import PoolsOfModel
from diptych.router.process.share import Share
from diptych.router.serve.aborts import Aborts
from diptych.router.serve.execution import Dispatcher
from diptych.router.serve.hedging import Hedging
from diptych.router.serve.models import Models
from diptych.router.serve.mover import Mover
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.prepare import Preparer
from diptych.router.serve.request_log import RequestLog
from diptych.router.serve.selection import Selector
from diptych.router.serve.usage_log import UsageLog
from diptych.router.text.fair_threads import FairThreadPool
from diptych.router.text.tokenization import Tokenization
from diptych.router.tracing.tracer import OpenExport, Tracer
from diptych.router.values.progress import RetryLimits
from diptych.router.values.request import ServedModel
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.drain import DrainableApp, OpenRequests, RouterDrain
from diptych.router.workers.fleet import AnyOf, Fleet, Membership
from diptych.router.workers.reconciler import Reconciler

if TYPE_CHECKING:  # of what most routers have not
    from diptych.router.batches.batches import Batches
    from diptych.router.console.console import Console
    from diptych.router.images.reader import ImageReader

MAX_CONNECTIONS: Final = 8192  # of HTTP; of gRPC as many
MAX_CONNECTION_S: Final = 60.0  # of gRPC, before a client is told to connect anew
MIN_CONNECTION_S: Final = 1.0
BODIES_IN_MEMORY: Final = 64  # of the longest; of shorter ones more
MAX_READING: Final = 64  # requests whose images are read at once
STOP_GRACE_S: Final = 3  # after draining, for the last words to running requests


FollowDesk: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What all models behind a router have in common."""

    metrics: RouterMetrics
    admission: Admission
    breakers: Breakers
    explanations: Explanations
    rng: random.Random
    grammars: GrammarChecks
    pixels: BodyBudget
    aborts: Aborts
    request_log: RequestLog | None  # None: there is none
    usage: UsageLog | None  # likewise


@dataclass(frozen=True, slots=True)
class ServedParts:
    """What each model has of its own, behind the same ports: its requests go to its workers."""

    model: ServedModel
    fleet: Fleet
    preparer: Preparer
    dispatcher: Dispatcher
    in_flight: InFlight
    pipeline: Pipeline
    mover: Mover | None  # None: it is off
    adapters: AdapterAdmin


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that its life is about."""

    served: Sequence[ServedParts]  # one at least
    health: RouterHealth
    admission: Admission
    draining: Draining
    http: HttpServer
    grpc: GrpcServer
    budget: BodyBudget
    tracer: Tracer
    console: Console | None  # None: it is off
    usage: UsageLog | None  # None: there is none
    callers: Callers | None  # None: nobody needs a key
    reconciler: Reconciler
    batches: Batches | None  # None: there is no store for them
    desk: Desk
    follow_desk: FollowDesk  # keeps the desk in step with the pools, until cancelled

    @property
    def fleet(self) -> Fleet:
        """The first model's, which keeps the sessions of all."""
        return self.served[0].fleet

    @property
    def dispatcher(self) -> Dispatcher:
        """The first model's."""
        return self.served[0].dispatcher

    @property
    def preparer(self) -> Preparer:
        """The first model's."""
        return self.served[0].preparer


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
    model = models[0]
    fleet = Fleet(membership, trust, model.model_id, metrics, router_id, _kinds(model))
    fleets = [fleet, *(fleet.beside(each.model_id, _kinds(each)) for each in models[1:])]
    health = RouterHealth(AnyOf(fleets))
    shared = _shared(config, metrics)
    admission = shared.admission
    metrics.watch(fleet, admission)

    def leave() -> None:
        health.drain()
        if console is not None:
            console.close()
        if batches is not None:
            batches.runner.leave()
        desk.leave()
        on_leaving()

    async def leave_shared_ports() -> None:
        if share is not None:
            http.leave_shared_port()
            await grpc.stop(STOP_GRACE_S)

    draining = Draining(OpenRequests(admission, fleet, leave_shared_ports), leave)
    reserved = reserved_names(config.served_model_name, models)
    desk, follow_desk = _desk(fleets, share)
    desks = [ModelDesk(desk, number) for number in range(len(models))]
    served = [_served(config, trust, *each, shared, reserved) for each in zip(models, fleets, desks, strict=True)]
    metrics.registry.register(TokenizerUsage([each.preparer.tokenization.cache for each in served]))
    pipelines = Models([each.pipeline for each in served], desk)
    metrics.registry.register(SessionLineUsage(desk))
    callers = _callers(config, metrics, share)
    batches = None
    if config.batch_store:
        from diptych.router.batches_wiring import Watched, new_batches
        from diptych.router.http.openai.batch_lines import LineServer

        serve = LineServer(pipelines, callers).serve
        watched = [Watched(each.fleet, each.in_flight) for each in served]
        batches = new_batches(config, pipelines, watched, admission, serve, metrics)
    tracer = _tracer(config, fleet, open_export)
    budget = BodyBudget(BODIES_IN_MEMORY * config.max_body_bytes)
    admins = {each.pipeline: each.adapters for each in served}
    app = clients_app(config, trust, admins, pipelines, health.probes, callers, tracer, budget, batches)
    if share is not None and config.open_metrics:
        app = with_all_metrics(app, metrics, ProcessMetrics(config.host, share.ports), share)
    console = None
    if config.console == "on":
        from diptych.router.console_wiring import ConsoleParts, add_console  # a router without it imports nothing of it

        dispatcher, admin = served[0].dispatcher, served[0].adapters
        parts = ConsoleParts(config, trust, model, fleets, admission, dispatcher, tracer, callers, budget, admin, share)
        app, console = add_console(app, parts)
    drain = RouterDrain(draining, f"{fleet.router_id:016x}", config.drain_s)
    reconciler = Reconciler(fleet, served[0].adapters, config.declared_file, time.monotonic)
    operators = operators_app(config, trust, fleet, pipelines, drain, reconciler, callers, budget)
    http = _http(config, DrainableApp(app, draining, operators), share)
    service = InferenceService(pipelines, callers, tracer, stall_s=config.client_stall_s)
    gate = CallGate(callers, budget, MessageReader(INFERENCE), stall_s=config.client_stall_s)
    grpc = _grpc(config, service, gate, health, share)
    return Router(
        served,
        health,
        admission,
        draining,
        http,
        grpc,
        budget,
        tracer,
        console,
        shared.usage,
        callers,
        reconciler,
        batches,
        desk,
        follow_desk,
    )


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


def _kinds(model: ServedModel) -> Sequence[LegKind]:
    return TEXT_KINDS if model.pooling is None else VECTOR_KINDS


def reserved_names(given: Sequence[str], models: Sequence[ServedModel]) -> Sequence[str]:
    """Return the names that no adapter may have; with several models it would stand before another model."""
    others = [name for model in models for name in (model.model_id, *model.names)] if len(models) > 1 else []
    return [*given, *others]


def _shared(config: RouterConfig, metrics: RouterMetrics) -> SharedParts:
    limits = AdmissionLimits(config.max_concurrent, config.max_queued, config.max_queue_wait_s)
    breakers, grammars = Breakers(config.breaker_failures), GrammarChecks()
    metrics.watch_breakers(lambda: len(breakers.opened(time.monotonic())))
    metrics.registry.register(GrammarUsage(grammars))
    return SharedParts(
        metrics,
        Admission(limits, on_refusal=metrics.turned_away_for),
        breakers,
        Explanations(config.explained_requests),
        random.Random(),
        grammars,
        BodyBudget(config.image_memory_bytes, "images and rows"),
        Aborts(),
        RequestLog(config.request_log) if config.request_log else None,
        _usage_log(config, metrics),
    )


def _served(
    config: RouterConfig,
    trust: Trust,
    model: ServedModel,
    fleet: Fleet,
    desk: ModelDesk,
    shared: SharedParts,
    reserved: Sequence[str],
) -> ServedParts:
    preparer = _preparer(config, model, fleet, shared)
    dispatcher = _dispatcher(config, fleet, shared)
    in_flight = InFlight()
    pipeline = _pipeline(config, model, preparer, dispatcher, in_flight, desk, shared)
    mover = Mover(dispatcher) if config.moves == "on" else None
    admin = AdapterAdmin(fleet, trust, reserved)
    return ServedParts(model, fleet, preparer, dispatcher, in_flight, pipeline, mover, admin)


def _dispatcher(config: RouterConfig, fleet: Fleet, shared: SharedParts) -> Dispatcher:
    plan = plan_of(config.policy, config.prefill_policy, config.decode_policy)
    seen = SeenPrompts(keeps_tokens=config.console_text)
    selector = Selector(fleet, plan, shared.breakers, shared.rng, seen)
    hedging = Hedging(config.hedge_after_s)
    return Dispatcher(fleet, selector, shared.metrics, shared.explanations, hedging, shared.rng, shared.request_log)


def _preparer(config: RouterConfig, model: ServedModel, fleet: Fleet, shared: SharedParts) -> Preparer:
    images = _images(config, model)
    tokenization = Tokenization(
        model,
        at=config.tokenize_at,
        num_threads=config.tokenizer_threads,
        cache_bytes=config.tokenizer_cache_bytes,
        images=images,
    )
    return Preparer(
        model,
        fleet,
        tokenization,
        shared.grammars,
        timeout_s=config.request_timeout_s,
        max_choices=config.max_choices,
        tiers=config.tiers,
        images=images,
        pixels=shared.pixels,
    )


def _images(config: RouterConfig, model: ServedModel) -> ImageReader | None:
    if model.vision is None:
        return None
    from diptych.router.images.fetch import ImageFetcher
    from diptych.router.images.reader import ImageReader

    fetcher = ImageFetcher(config.image_urls, max_bytes=config.max_image_bytes, timeout_s=config.image_fetch_s)
    threads = FairThreadPool(config.image_threads, "images")
    max_reading = max(1, min(MAX_READING, config.max_concurrent // 4))  # places are left for requests without images
    most = config.max_image_scaled_pixels
    vision = model.vision.at_most(most) if most else model.vision
    return ImageReader(vision, config.image_limits, fetcher, threads, max_reading)


def _pipeline(
    config: RouterConfig,
    model: ServedModel,
    preparer: Preparer,
    dispatcher: Dispatcher,
    in_flight: InFlight,
    desk: ModelDesk,
    shared: SharedParts,
) -> Pipeline:
    selector, metrics = dispatcher.selector, dispatcher.metrics
    gate = TtftGate(selector, config.ttft_deadline_ms / 1000, metrics.turned_away_for)
    shedder = Shedder(config.tiers, selector.outlook, in_flight, dispatcher.rng)
    retries = RetryLimits(config.pair_wait_s, config.lost_pair_wait_s, cold_wait_s=config.cold_wait_s)
    usage, aborts = shared.usage, shared.aborts
    return Pipeline(
        model, preparer, dispatcher, shared.admission, gate, shedder, in_flight, retries, desk, usage, aborts
    )


def _usage_log(config: RouterConfig, metrics: RouterMetrics) -> UsageLog | None:
    if config.usage_log is None:
        return None
    usage = UsageLog(config.usage_log)
    metrics.registry.register(usage)
    return usage


def _callers(config: RouterConfig, metrics: RouterMetrics, share: Share | None) -> Callers | None:
    callers = open_callers(config, new_ledger=share.ledger if share else Ledger)
    if callers:
        metrics.registry.register(KeyUsage(callers))
    return callers


def _tracer(config: RouterConfig, fleet: Fleet, open_export: OpenExport | None) -> Tracer:
    if open_export is None:
        return Tracer(num_processes=config.workers)
    attributes = {"service.instance.id": f"{fleet.router_id:016x}", "k8s.pod.name": config.pod_name}
    return Tracer(open_export({name: value for name, value in attributes.items() if value}))


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


def _grpc(
    config: RouterConfig, service: InferenceService, gate: CallGate, health: RouterHealth, share: Share | None
) -> GrpcServer:
    return GrpcServer(
        service,
        gate,
        health.probes,
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
