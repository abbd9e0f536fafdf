"""The HTTP applications of a router: the one of its clients, and the one of its operators.

`Shortcut` leads requests for text past the framework: its layers of middleware would touch every write of every stream.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.common.drain.draining import Drainable, drain_route
from diptych.common.errors import InternalError
from diptych.common.health.probes import Probes
from diptych.common.trust.trust import INSECURE, Trust
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.config import RouterConfig
from diptych.router.http.exchange.app import APIS, create_app
from diptych.router.http.exchange.body import BodyLimits, BodyReader
from diptych.router.http.exchange.cors import with_cors
from diptych.router.http.exchange.errors import error_response
from diptych.router.http.exchange.exchange import Api, Exchange
from diptych.router.http.exchange.key_gate import KeyGate
from diptych.router.http.exchange.traced import Traced
from diptych.router.http.operate.adapters import add_adapters
from diptych.router.http.operate.admin import admin_routes, operators_app
from diptych.router.http.operate.metrics_route import AllMetrics, closed_metrics_route, open_metrics_route
from diptych.router.keys.caller import Callers
from diptych.router.process.health import ProcessMetrics
from diptych.router.process.share import Share
from diptych.router.serve.pipeline import Pipeline
from diptych.router.tracing.tracer import Tracer
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.drain import DRAIN_PATH
from diptych.router.workers.fleet import Fleet

logger = logging.getLogger(__name__)


class Shortcut:
    """An ASGI application in front of another one, which answers all that is not a POST to one of `apis`."""

    def __init__(self, app: ASGIApp, exchange: Exchange, apis: Mapping[str, Api]) -> None:
        self._app = app
        self._exchange = exchange
        self._apis = apis  # by path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self._apis.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if api is None:
            return await self._app(scope, receive, send)
        response = await self._answer(Request(scope, receive), api)
        return await response(scope, receive, send)

    async def _answer(self, request: Request, api: Api) -> Response:
        try:
            return await self._exchange.answer(request, api)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            error = InternalError("internal error; the router's log has the details")
            return error_response(error, {}, api.error_body)


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
