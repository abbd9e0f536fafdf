"""What is served, as OpenAI's clients ask for it: the model under its names, and its adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diptych.router.errors import ModelNotFound
from diptych.router.http.exchange.errors import error_response
from diptych.router.http.exchange.json_response import json_response
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.serve.pipeline import Pipeline

Json = dict[str, Any]


def add_models(app: FastAPI, pipeline: Pipeline) -> None:
    """Add both paths to the application."""
    created = int(time.time())
    app.add_route("/v1/models", partial(_list, pipeline, created), methods=["GET"])
    app.add_route("/v1/models/{model_id:path}", partial(_show, pipeline, created), methods=["GET"])


async def _list(pipeline: Pipeline, created: int, request: Request) -> Response:
    return json_response({"object": "list", "data": list(listed(pipeline, created).values())}, request)


async def _show(pipeline: Pipeline, created: int, request: Request) -> Response:
    name = request.path_params["model_id"]
    known = listed(pipeline, created)
    if name in pipeline.model_ids:
        known.setdefault(name, {"id": name, **_common(pipeline, created)})  # requests may call it so, too
    if name not in known:
        error = ModelNotFound(f"the model {name!r} does not exist")
        return error_response(error, {HEADER: request_id_of(request)})
    return json_response(known[name], request)


def listed(pipeline: Pipeline, created: int) -> Json:
    """Return each model by the name that a request gives, first the model itself: clients that take any take that."""
    common = _common(pipeline, created)
    served = {name: {"id": name, **common} for name in pipeline.names}
    names = [name for name in pipeline.adapters if name not in served]  # a name of the model's is no adapter's
    return served | {name: {"id": name, **common, "parent": pipeline.names[0]} for name in names}


def _common(pipeline: Pipeline, created: int) -> Mapping[str, Any]:
    context_len = pipeline.context_len
    return {
        "object": "model",
        "created": created,
        "owned_by": "diptych",
        "root": pipeline.model_ids[0],
        "context_len": context_len,
        "max_model_len": context_len,  # as vLLM's clients look for it
    }
