"""The HTTP API: OpenAI's paths, and those for operators. What is refused here never reaches the pipeline."""

from __future__ import annotations

import time
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError
from diptych.router.errors import ModelNotFound
from diptych.router.http.answer import StreamAnswer, WholeAnswer
from diptych.router.http.ask import Origin, Parse, parse_chat, parse_completion
from diptych.router.http.body import read_body
from diptych.router.http.errors import error_response, plain_error_response
from diptych.router.http.request_id import HEADER, request_id_of
from diptych.router.outcome import outcome_of
from diptych.router.pipeline import Pipeline

PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def create_app(pipeline: Pipeline, *, max_body_bytes: int) -> FastAPI:
    """Return the application; it holds no state but the pipeline's."""
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _framework_error)
    _add_generation(app, Exchange(pipeline, max_body_bytes))
    _add_models(app, pipeline)
    _add_operations(app, pipeline)
    return app


class Exchange:
    """Turns a request into the answer that will serve it, or into an error."""

    def __init__(self, pipeline: Pipeline, max_body_bytes: int) -> None:
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes

    async def answer(self, request: Request, api: str, parse: Parse) -> Response:
        origin = Origin(request_id_of(request), request.headers)
        headers = {HEADER: origin.request_id}
        try:
            ask = parse(await read_body(request, self._max_body_bytes), origin, self._pipeline.model)
        except DiptychError as error:
            self._pipeline.metrics.requests.labels(api, outcome_of(error)).inc()
            return error_response(error, headers)
        kind = StreamAnswer if ask.stream else WholeAnswer
        return kind(self._pipeline, api, ask, headers)


def _add_generation(app: FastAPI, exchange: Exchange) -> None:
    """Plain routes: the body is read and checked here, and FastAPI's dependencies cost a tenth of a small request."""

    async def chat_completions(request: Request) -> Response:
        return await exchange.answer(request, "chat", parse_chat)

    async def completions(request: Request) -> Response:
        return await exchange.answer(request, "completions", parse_completion)

    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_route("/v1/completions", completions, methods=["POST"])


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


def _add_operations(app: FastAPI, pipeline: Pipeline) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process is alive; says nothing of workers."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/ready")
    async def ready() -> Response:
        """A request that came now could be served."""
        problem = pipeline.problem
        body = {"ready": problem is None, "reason": problem or "at least one pair of workers is ready"}
        return Response(orjson.dumps(body), 200 if problem is None else 503, media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(pipeline.metrics.exposition(), headers={"content-type": PROMETHEUS_TEXT})


def json_response(value: object, request: Request) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", headers={HEADER: request_id_of(request)})


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = {**(error.headers or {}), HEADER: request_id_of(request)}
    return plain_error_response(error.status_code, message, headers)
