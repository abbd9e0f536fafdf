"""The HTTP API: OpenAI's paths, and those for operators. What is refused here never reaches the pipeline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import InternalError
from diptych.common.health import Page, health_pages
from diptych.common.probes import Probes
from diptych.router.errors import ModelNotFound
from diptych.router.http.anthropic_errors import anthropic_error_body
from diptych.router.http.ask import parse_chat, parse_completion, parse_generate, parse_messages, parse_responses
from diptych.router.http.errors import error_response, plain_error_response
from diptych.router.http.exchange import Api, Exchange
from diptych.router.http.json_response import json_response
from diptych.router.http.openapi.document import document
from diptych.router.http.openapi.operations import OPERATIONS
from diptych.router.http.request_id import HEADER, request_id_of
from diptych.router.http.tokens import add_tokens
from diptych.router.pipeline import Pipeline

PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
APIS: Final = (
    Api("chat", "/v1/chat/completions", parse_chat),
    Api("completions", "/v1/completions", parse_completion),
    Api("responses", "/v1/responses", parse_responses),
    Api("messages", "/v1/messages", parse_messages, anthropic_error_body, "request-id"),
    Api("generate", "/generate", parse_generate),
)


def create_app(pipeline: Pipeline, probes: Probes, exchange: Exchange) -> FastAPI:
    """Return the application; it holds no state but the pipeline's."""
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _our_error)
    _add_generation(app, exchange)
    add_tokens(app, pipeline, exchange.limits)
    _add_models(app, pipeline)
    _add_operations(app, pipeline, probes)
    _add_probes(app, probes)
    return app


def _add_generation(app: FastAPI, exchange: Exchange) -> None:
    """Plain routes: the body is read and checked here, and FastAPI's dependencies cost a tenth of a small request."""
    for api in APIS:
        app.add_route(api.path, partial(_generate, exchange, api), methods=["POST"])


async def _generate(exchange: Exchange, api: Api, request: Request) -> Response:
    return await exchange.answer(request, api)


def _add_models(app: FastAPI, pipeline: Pipeline) -> None:
    created = int(time.time())

    def models() -> dict[str, dict[str, Any]]:
        base = pipeline.model.model_id
        common = {"object": "model", "created": created, "owned_by": "diptych", "context_len": pipeline.context_len}
        adapters = {name: {"id": name, **common, "parent": base} for name in pipeline.adapters}
        return {base: {"id": base, **common}, **adapters}

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": list(models().values())}, request)

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str, request: Request) -> Response:
        model = models().get(model_id)
        if model is None:
            error = ModelNotFound(f"the model {model_id!r} does not exist")
            return error_response(error, {HEADER: request_id_of(request)})
        return json_response(model, request)


def _add_operations(app: FastAPI, pipeline: Pipeline, probes: Probes) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process is alive; says nothing of workers."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/ready")
    async def ready() -> Response:
        """A request that came now could be served."""
        verdict = probes.ready()
        body = {"ready": verdict.is_good, "reason": verdict.reason}
        return Response(orjson.dumps(body), 200 if verdict.is_good else 503, media_type="application/json")

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(openapi_json(), media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(pipeline.metrics.exposition(), headers={"content-type": PROMETHEUS_TEXT})


@cache
def openapi_json() -> bytes:
    """Made for the first who asks: most routers are never asked. Its limits of numbers are too large for orjson."""
    return json.dumps(document(OPERATIONS)).encode()


def _add_probes(app: FastAPI, probes: Probes) -> None:
    """The same as on the health port: a load balancer may know no other port than this one."""
    for path, ask in health_pages(probes).items():
        app.add_route(path, partial(_show, ask), methods=["GET"])


async def _show(ask: Callable[[], Page], request: Request) -> Response:
    page = ask()
    return Response(page.body, page.status, media_type=page.content_type)


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = {**(error.headers or {}), HEADER: request_id_of(request)}
    return plain_error_response(error.status_code, message, headers)


async def _our_error(request: Request, error: Exception) -> Response:
    """The server logs it: what is left is an answer in our form."""
    words = InternalError("internal error; the router's log has the details")
    return error_response(words, {HEADER: request_id_of(request)})
