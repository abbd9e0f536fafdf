"""The HTTP applications of a router: the one of its clients, and the one of its operators."""

from __future__ import annotations

from starlette.types import ASGIApp

from diptych.common.drain_api import Drainable, drain_route
from diptych.common.probes import Probes
from diptych.common.trust import INSECURE, Trust
from diptych.router.adapter_admin import AdapterAdmin
from diptych.router.config import RouterConfig
from diptych.router.drain import DRAIN_PATH
from diptych.router.fleet import Fleet
from diptych.router.http.adapters import add_adapters
from diptych.router.http.admin import admin_routes, operators_app
from diptych.router.http.all_metrics import AllMetrics
from diptych.router.http.app import APIS, create_app
from diptych.router.http.body import BodyLimits
from diptych.router.http.exchange import Exchange
from diptych.router.http.key_gate import KeyGate
from diptych.router.http.shortcut import Shortcut
from diptych.router.http.traced import Traced
from diptych.router.keys.callers import Callers
from diptych.router.pipeline import Pipeline
from diptych.router.process_metrics import ProcessMetrics
from diptych.router.share import Share
from diptych.router.tracing.tracer import Tracer


def clients_app(
    config: RouterConfig,
    trust: Trust,
    fleet: Fleet,
    pipeline: Pipeline,
    probes: Probes,
    callers: Callers | None,
    tracer: Tracer | None,
) -> ASGIApp:
    """Return the APIs; with `callers` they want a key, with `tracer` they are followed."""
    limits = BodyLimits(config.max_body_bytes, config.client_stall_s, config.request_timeout_s)
    exchange = Exchange(pipeline, limits)
    app = create_app(pipeline, probes, exchange)
    if config.runtime_lora:
        add_adapters(app, AdapterAdmin(fleet, trust), limits)
    apis = {api.path: api for api in APIS}
    served: ASGIApp = Shortcut(app, exchange, apis)
    served = Traced(served, tracer, apis) if tracer else served
    return KeyGate(served, callers) if callers else served


def with_all_metrics(app: ASGIApp, config: RouterConfig, pipeline: Pipeline, share: Share) -> ASGIApp:
    """Put in front of one of several processes what shows the metrics of all."""
    return AllMetrics(app, ProcessMetrics(share, config.host), pipeline.metrics.exposition, share.own_port)


def admin_app(trust: Trust, fleet: Fleet, pipeline: Pipeline, drain: Drainable, callers: Callers | None) -> ASGIApp:
    """Return what operators see and do; it wants their token, or a key where nobody has a token."""
    refusals = pipeline.metrics.refusals
    draining = drain_route(DRAIN_PATH, drain, trust, refusals)
    app = operators_app([draining, *admin_routes(fleet, pipeline.explain, trust, refusals)])
    return KeyGate(app, callers) if callers and trust == INSECURE else app  # clients reach the port, too
