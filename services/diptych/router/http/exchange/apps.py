"""The HTTP applications of a router: the one of its clients, and the one of its operators."""

from __future__ import annotations

from starlette.types import ASGIApp

from diptych.common.drain.draining import Drainable, drain_route
from diptych.common.health.probes import Probes
from diptych.common.trust.trust import INSECURE, Trust
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.config import RouterConfig
from diptych.router.http.exchange.app import APIS, create_app
from diptych.router.http.exchange.body import BodyLimits, BodyReader
from diptych.router.http.exchange.cors import with_cors
from diptych.router.http.exchange.exchange import Exchange
from diptych.router.http.exchange.key_gate import KeyGate
from diptych.router.http.exchange.shortcut import Shortcut
from diptych.router.http.exchange.traced import Traced
from diptych.router.http.operate.adapters import add_adapters
from diptych.router.http.operate.admin import admin_routes, operators_app
from diptych.router.http.operate.all_metrics import AllMetrics
from diptych.router.http.operate.metrics_route import closed_metrics_route, open_metrics_route
from diptych.router.keys.callers import Callers
from diptych.router.process.metrics import ProcessMetrics
from diptych.router.process.share import Share
from diptych.router.serve.pipeline import Pipeline
from diptych.router.tracing.tracer import Tracer
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.drain import DRAIN_PATH
from diptych.router.workers.fleet import Fleet


def clients_app(
    config: RouterConfig,
    trust: Trust,
    fleet: Fleet,
    pipeline: Pipeline,
    probes: Probes,
    callers: Callers | None,
    tracer: Tracer | None,
    budget: BodyBudget,
) -> ASGIApp:
    """Return the APIs; with `callers` they want a key, with `tracer` they are followed."""
    limits = BodyLimits(config.max_body_bytes, config.client_stall_s, config.request_timeout_s)
    bodies = BodyReader(limits, budget)
    exchange = Exchange(pipeline, bodies)
    app = create_app(pipeline, probes, exchange)
    app.router.routes.append(open_metrics_route(pipeline.metrics) if config.open_metrics else closed_metrics_route())
    if config.runtime_lora:
        add_adapters(app, AdapterAdmin(fleet, trust, config.served_model_name), bodies)
    apis = {api.path: api for api in APIS}
    served: ASGIApp = Shortcut(app, exchange, apis)
    served = Traced(served, tracer, apis) if tracer else served
    return with_cors(KeyGate(served, callers) if callers else served, config.cors_origins)


def with_all_metrics(app: ASGIApp, config: RouterConfig, pipeline: Pipeline, share: Share) -> ASGIApp:
    """Put in front of one of several processes what shows the metrics of all, where `--open-metrics` shows any."""
    if not config.open_metrics:
        return app
    return AllMetrics(app, ProcessMetrics(config.host, share.ports), pipeline.metrics.exposition, share)


def admin_app(trust: Trust, fleet: Fleet, pipeline: Pipeline, drain: Drainable, callers: Callers | None) -> ASGIApp:
    """Return what operators see and do; it wants their token, or a key where nobody has a token."""
    refusals = pipeline.metrics.refusals
    draining = drain_route(DRAIN_PATH, drain, trust, refusals)
    app = operators_app([draining, *admin_routes(fleet, pipeline.explain, trust, refusals)])
    return KeyGate(app, callers) if callers and trust == INSECURE else app  # clients reach the port, too
