"""The HTTP applications of a router: the one of its clients, and the one of its operators.

What is refused here never reaches the pipeline. Requests for text are led past the framework: its layers of middleware
would touch every write of every stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.common.draining import Drainable
from diptych.common.errors import InternalError
from diptych.common.health.health import Page, health_pages
from diptych.common.trust.trust import INSECURE, Trust
from diptych.common.verdicts.probes import Probes
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.config import RouterConfig
from diptych.router.http.exchange.answers import NotServed, error_response, refusal
from diptych.router.http.exchange.body import BodyLimits, BodyReader
from diptych.router.http.exchange.cors import with_cors
from diptych.router.http.exchange.exchange import OUR_BUG, Api, Exchange
from diptych.router.http.exchange.key_gate import with_keys
from diptych.router.http.exchange.parse import (
    parse_chat,
    parse_completion,
    parse_generate,
    parse_messages,
    parse_responses,
)
from diptych.router.http.exchange.traced import with_traces
from diptych.router.http.native.tokens import add_tokens
from diptych.router.http.openai.batch_paths import refuse_batches
from diptych.router.http.openai.models import add_models
from diptych.router.http.operate.about import add_about, metrics_route
from diptych.router.http.operate.adapters import add_adapters, refuse_adapters
from diptych.router.http.operate.admin import admin_app
from diptych.router.http.operate.server_tools import add_server_tools, add_sessions, operators_routes
from diptych.router.http.vectors.vector_paths import VECTOR_PATHS
from diptych.router.keys.caller import Callers
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.tracing.tracer import Tracer
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.reconciler import Reconciler

if TYPE_CHECKING:
    from diptych.router.batches.batches import Batches

logger = logging.getLogger(__name__)

APIS: Final = (
    Api("chat", "/v1/chat/completions", parse_chat),
    Api("completions", "/v1/completions", parse_completion),
    Api("responses", "/v1/responses", parse_responses),
    Api("messages", "/v1/messages", parse_messages, "request-id"),
    Api("generate", "/generate", parse_generate),
)


def clients_app(
    config: RouterConfig,
    trust: Trust,
    admins: Mapping[Pipeline, AdapterAdmin],
    models: Models,
    probes: Probes,
    callers: Callers | None,
    tracer: Tracer,
    budget: BodyBudget,
    batches: Batches | None,
) -> ASGIApp:
    """Return the APIs; with `callers` they want a key. `admins` load the adapters of each model."""
    bodies = _bodies(config, budget)
    exchange = Exchange(models, bodies)
    app = _framework_app(models, probes, exchange)
    add_server_tools(app, models, bodies, trust)
    add_sessions(app, models, bodies)
    _add_batches(app, batches, bodies)
    app.router.routes.append(metrics_route(models.metrics if config.open_metrics else None))
    if config.runtime_lora:
        add_adapters(app, models, admins, bodies)
    else:
        refuse_adapters(app)
    apis = {api.path: api for api in APIS}
    served = with_traces(_past_the_framework(app, exchange, apis), tracer, {*apis, *VECTOR_PATHS})
    return with_cors(with_keys(served, callers) if callers else served, config.cors_origins)


def operators_app(
    config: RouterConfig,
    trust: Trust,
    fleet: Fleet,
    models: Models,
    drain: Drainable,
    reconciler: Reconciler,
    callers: Callers | None,
    budget: BodyBudget,
) -> ASGIApp:
    """Return what operators see and do; it wants their token, or a key where nobody has a token."""
    refusals = models.metrics.refusals
    tools = operators_routes(models.first, fleet, _bodies(config, budget), trust, refusals)
    app = admin_app(fleet, models.explain, drain, reconciler, trust, refusals, tools)
    return with_keys(app, callers) if callers and trust == INSECURE else app  # clients reach the port, too


def _add_batches(app: FastAPI, batches: Batches | None, bodies: BodyReader) -> None:
    if batches is None:
        return refuse_batches(app)
    from diptych.router.http.openai.batches import add_batches

    return add_batches(app, batches, bodies)


def _add_vectors(app: FastAPI, models: Models, bodies: BodyReader) -> None:
    """Where all models make text, what refuses these requests is imported at the first one, beside the loop."""
    makes_vectors = any(pipeline.model.pooling is not None for pipeline in models)
    at_once = _vector_answers() if makes_vectors else None

    async def answer(path: str, request: Request) -> Response:
        answer_vectors = await asyncio.to_thread(_vector_answers) if at_once is None else at_once
        return await answer_vectors(path, request, models, bodies)

    for path in VECTOR_PATHS:
        app.add_route(path, partial(answer, path), methods=["POST"])


def _vector_answers() -> Callable[[str, Request, Models, BodyReader], Awaitable[Response]]:
    from diptych.router.http.vectors.routes import answer_vectors

    return answer_vectors


def _bodies(config: RouterConfig, budget: BodyBudget) -> BodyReader:
    limits = BodyLimits(config.max_body_bytes, config.client_stall_s, config.request_timeout_s)
    return BodyReader(limits, budget)


def _past_the_framework(app: ASGIApp, exchange: Exchange, apis: Mapping[str, Api]) -> ASGIApp:
    """Return an application that leaves to `app` all but POSTs to these, by path."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        api = apis.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if api is None:
            return await app(scope, receive, send)
        request = Request(scope, receive)
        try:
            response = await exchange.answer(api, request)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            response = error_response(InternalError(OUR_BUG), api.path, {})
        return await response(scope, receive, send)

    return serve


def _framework_app(models: Models, probes: Probes, exchange: Exchange) -> FastAPI:
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _our_error)
    for api in APIS:  # POSTs were led past: what comes here has another method
        app.add_route(api.path, partial(exchange.answer, api), methods=["POST"])
    add_tokens(app, models, exchange.bodies)
    _add_vectors(app, models, exchange.bodies)
    add_models(app, models)
    add_about(app, probes, [api.path for api in APIS])
    app.add_route("/openapi.json", _openapi, methods=["GET"])
    for path, ask in health_pages(probes).items():  # as on the health port: a load balancer may know only this one
        app.add_route(path, partial(_show, ask), methods=["GET"])
    return app


async def _openapi(request: Request) -> Response:
    """Answer with the document; what makes it knows every API, and is imported once somebody asks, beside the loop."""
    return Response(await asyncio.to_thread(_openapi_json), media_type="application/json")


def _openapi_json() -> bytes:
    from diptych.router.http.operate.openapi import openapi_json

    return openapi_json()


async def _show(ask: Callable[[], Page], request: Request) -> Response:
    page = ask()
    return Response(page.body, page.status, media_type=page.content_type)


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return refusal(NotServed(error.status_code, message), request, error.headers)


async def _our_error(request: Request, error: Exception) -> Response:
    """The server logs it: what is left is an answer in our form."""
    return refusal(InternalError(OUR_BUG), request)
