"""What is served, as OpenAI's clients ask for it: each model under its names, and its adapters."""

from __future__ import annotations

import time
from functools import partial
from typing import Literal, NotRequired

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.router.errors import ModelNotFound
from diptych.router.http.exchange.answers import json_response, refusal
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline


class Model(TypedDict):
    """A model, or an adapter of it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    context_len: int
    purpose: Literal["generate", "embed", "classify"]  # text, or what /v1/embeddings or /classify want
    max_model_len: int  # the same, as vLLM's clients look for it
    parent: NotRequired[str]  # of an adapter


class ModelList(TypedDict):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


def add_models(app: FastAPI, models: Models) -> None:
    """Add both paths to the application."""
    created = int(time.time())
    app.add_route("/v1/models", partial(_list, models, created), methods=["GET"])
    app.add_route("/v1/models/{model_id:path}", partial(_show, models, created), methods=["GET"])


async def _list(models: Models, created: int, request: Request) -> Response:
    found: ModelList = {"object": "list", "data": list(listed_all(models, created).values())}
    return json_response(found, request)


async def _show(models: Models, created: int, request: Request) -> Response:
    name = request.path_params["model_id"]
    known = listed_all(models, created)
    for pipeline in models:
        if name in pipeline.model_ids:
            known.setdefault(name, _model(name, pipeline, created))  # requests may call it so, too
    if name not in known:
        return refusal(ModelNotFound(f"the model {name!r} does not exist"), request)
    return json_response(known[name], request)


def listed_all(models: Models, created: int) -> dict[str, Model]:
    """Return what each model has, the first one's first; a name that several have is the one's that serves it."""
    found = {name: _model(name, pipeline, created) for pipeline in models for name in pipeline.names}
    for pipeline in models:
        for name, model in listed(pipeline, created).items():
            found.setdefault(name, model)
    return found


def listed(pipeline: Pipeline, created: int) -> dict[str, Model]:
    """Return each model by the name that a request gives, first the model itself: clients that take any take that."""
    served = {name: _model(name, pipeline, created) for name in pipeline.names}
    for name in pipeline.adapters:
        if name not in served:  # a name of the model's is no adapter's
            served[name] = _model(name, pipeline, created) | {"parent": pipeline.names[0]}
    return served


def _model(name: str, pipeline: Pipeline, created: int) -> Model:
    context_len = pipeline.context_len
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "diptych",
        "root": pipeline.model_ids[0],
        "context_len": context_len,
        "purpose": "generate" if pipeline.model.pooling is None else pipeline.model.pooling.purpose,
        "max_model_len": context_len,
    }
