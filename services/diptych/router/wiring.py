"""Builds a router out of its parts, layer by layer: the fleet, the pipeline over it, and the servers in front."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diptych.common.draining import Draining
from diptych.common.http_server import HttpServer
from diptych.common.trust import Trust
from diptych.router.admission import Admission
from diptych.router.admission_queue import AdmissionLimits
from diptych.router.breakers import Breakers
from diptych.router.config import RouterConfig
from diptych.router.drain import DrainableApp, OpenRequests, RouterDrain
from diptych.router.execution import Dispatcher
from diptych.router.explain import Explanations
from diptych.router.fleet import Fleet, Membership
from diptych.router.grpc.inference import InferenceService
from diptych.router.grpc.server import GrpcServer
from diptych.router.health import RouterHealth
from diptych.router.hedging import Hedging
from diptych.router.http.apps import admin_app, clients_app, with_all_metrics
from diptych.router.keys.callers import Callers
from diptych.router.keys.metrics import KeyUsage
from diptych.router.metrics import RouterMetrics
from diptych.router.pipeline import Pipeline
from diptych.router.policies import plan_of
from diptych.router.prepare import Preparer
from diptych.router.progress import RetryLimits
from diptych.router.selection import Selector
from diptych.router.served_model import ServedModel
from diptych.router.share import Share
from diptych.router.tokenization import Tokenization
from diptych.router.tokenizer_metrics import TokenizerUsage
from diptych.router.tracing.environment import OpenExport
from diptych.router.tracing.tracer import Tracer
from diptych.router.ttft_gate import TtftGate

MAX_CONNECTION_S: Final = 60.0  # of gRPC, before a client is told to connect anew
MIN_CONNECTION_S: Final = 1.0
STOP_GRACE_S: Final = 3  # after draining, for the last words to running requests


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that its life is about."""

    fleet: Fleet
    health: RouterHealth
    admission: Admission
    dispatcher: Dispatcher
    draining: Draining
    preparer: Preparer
    http: HttpServer
    grpc: GrpcServer
    tracer: Tracer | None


def build(
    config: RouterConfig,
    trust: Trust,
    model: ServedModel,
    membership: Membership,
    on_leaving: Callable[[], None] = lambda: None,
    share: Share | None = None,
    open_export: OpenExport | None = None,
) -> Router:
    """Wire a router, or one of its processes. Its ports are bound, but nothing runs yet."""
    metrics = RouterMetrics()
    fleet = Fleet(membership, trust, model.model_id, metrics, router_id=secrets.randbits(64) or 1)
    health = RouterHealth(fleet)
    admission = _admission(config, metrics)
    metrics.watch(fleet, admission)

    def leave() -> None:
        health.drain()
        on_leaving()

    async def leave_shared_ports() -> None:
        if share is not None:
            http.leave_shared_port()
            await grpc.stop(STOP_GRACE_S)

    draining = Draining(OpenRequests(admission, fleet, leave_shared_ports), leave)
    dispatcher = _dispatcher(config, fleet, metrics)
    preparer = _preparer(config, model, fleet, metrics)
    pipeline = _pipeline(config, model, preparer, dispatcher, admission)
    callers = _callers(config, metrics)
    tracer = _tracer(config, fleet, open_export)
    app = clients_app(config, trust, fleet, pipeline, health.probes, callers, tracer)
    app = app if share is None else with_all_metrics(app, config, pipeline, share)
    drain = RouterDrain(draining, f"{fleet.router_id:016x}", config.drain_s)
    http = _http(config, DrainableApp(app, draining, admin_app(trust, fleet, pipeline, drain, callers)), share)
    service = InferenceService(pipeline, callers, tracer, stall_s=config.client_stall_s)
    grpc = _grpc(config, service, health, share)
    return Router(fleet, health, admission, dispatcher, draining, preparer, http, grpc, tracer)


def _admission(config: RouterConfig, metrics: RouterMetrics) -> Admission:
    limits = AdmissionLimits(config.max_concurrent, config.max_queued, config.max_queue_wait_s)
    return Admission(limits, on_refusal=metrics.turned_away_for)


def _dispatcher(config: RouterConfig, fleet: Fleet, metrics: RouterMetrics) -> Dispatcher:
    breakers = Breakers(config.breaker_failures)
    metrics.watch_breakers(lambda: len(breakers.opened(time.monotonic())))
    plan = plan_of(config.policy, config.prefill_policy, config.decode_policy)
    selector = Selector(fleet, plan, breakers, random.Random())
    return Dispatcher(fleet, selector, metrics, Explanations(config.explained_requests), Hedging(config.hedge_after_s))


def _preparer(config: RouterConfig, model: ServedModel, fleet: Fleet, metrics: RouterMetrics) -> Preparer:
    tokenization = Tokenization(
        model,
        at=config.tokenize_at,
        num_threads=config.tokenizer_threads,
        cache_bytes=config.tokenizer_cache_bytes,
    )
    metrics.registry.register(TokenizerUsage(tokenization.cache))
    return Preparer(model, fleet, tokenization, timeout_s=config.request_timeout_s)


def _pipeline(
    config: RouterConfig, model: ServedModel, preparer: Preparer, dispatcher: Dispatcher, admission: Admission
) -> Pipeline:
    gate = TtftGate(dispatcher.selector, config.ttft_slo_s, dispatcher.metrics.turned_away_for)
    retries = RetryLimits(config.pair_wait_s, config.lost_pair_wait_s)
    return Pipeline(model, preparer, dispatcher, admission, gate, retries)


def _callers(config: RouterConfig, metrics: RouterMetrics) -> Callers | None:
    callers = config.callers()
    if callers:
        metrics.registry.register(KeyUsage(callers))
    return callers


def _tracer(config: RouterConfig, fleet: Fleet, open_export: OpenExport | None) -> Tracer | None:
    if open_export is None:
        return None
    attributes = {"service.instance.id": f"{fleet.router_id:016x}", "k8s.pod.name": config.pod_name}
    return Tracer(open_export({name: value for name, value in attributes.items() if value}))


def _http(config: RouterConfig, app: DrainableApp, share: Share | None) -> HttpServer:
    grace_s = math.ceil(config.drain_s) + STOP_GRACE_S
    own_port = share.own_port if share else None
    return HttpServer(
        app, config.host, config.http_port, stop_grace_s=grace_s, stall_s=config.client_stall_s, own_port=own_port
    )


def _grpc(config: RouterConfig, service: InferenceService, health: RouterHealth, share: Share | None) -> GrpcServer:
    return GrpcServer(
        service,
        health.probes,
        config.host,
        config.grpc_port,
        max_message_bytes=config.max_body_bytes,
        max_connection_s=_max_connection_s(config.drain_s),
        shared=share is not None,
    )


def _max_connection_s(drain_s: float) -> float:
    """All connections shall have moved, and their last calls have time to end, before a drain's deadline."""
    return min(MAX_CONNECTION_S, max(MIN_CONNECTION_S, drain_s / 3))
