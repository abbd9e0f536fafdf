"""The HTTP API: OpenAI's paths, and those for operators. What is refused here never reaches the pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import InternalError
from diptych.common.health.health import Page, health_pages
from diptych.common.health.probes import Probes
from diptych.router.http.anthropic.errors import anthropic_error_body, is_anthropic, plain_anthropic_body
from diptych.router.http.exchange.errors import error_body, error_response, plain_error_body, plain_error_response
from diptych.router.http.exchange.exchange import Api, Exchange
from diptych.router.http.exchange.parse import (
    parse_chat,
    parse_completion,
    parse_generate,
    parse_messages,
    parse_responses,
)
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.http.native.tokens import add_tokens
from diptych.router.http.openai.models import add_models
from diptych.router.http.openapi.document import document
from diptych.router.http.openapi.operations import OPERATIONS
from diptych.router.http.operate.about import add_about
from diptych.router.serve.pipeline import Pipeline

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
    add_tokens(app, pipeline, exchange.bodies)
    add_models(app, pipeline)
    add_about(app, probes, [api.path for api in APIS])
    app.add_route("/openapi.json", _openapi, methods=["GET"])
    _add_probes(app, probes)
    return app


def _add_generation(app: FastAPI, exchange: Exchange) -> None:
    """Plain routes: the body is read and checked here, and FastAPI's dependencies cost a tenth of a small request."""
    for api in APIS:
        app.add_route(api.path, partial(_generate, exchange, api), methods=["POST"])


async def _generate(exchange: Exchange, api: Api, request: Request) -> Response:
    return await exchange.answer(request, api)


async def _openapi(request: Request) -> Response:
    return Response(openapi_json(), media_type="application/json")


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
    body = plain_anthropic_body if is_anthropic(request.url.path) else plain_error_body
    return plain_error_response(error.status_code, message, headers, body)


async def _our_error(request: Request, error: Exception) -> Response:
    """The server logs it: what is left is an answer in our form."""
    words = InternalError("internal error; the router's log has the details")
    body = anthropic_error_body if is_anthropic(request.url.path) else error_body
    return error_response(words, {HEADER: request_id_of(request)}, body)
