"""Loading and unloading adapters over HTTP, by vLLM's paths. Without `--runtime-lora` they say so.

Who may call it can make workers read any folder: it belongs behind a gateway that lets only operators through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Final, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.router.http.exchange.answers import NotServed, json_response, refusal
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.fields.strict_model import Body
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.workers.adapter_admin import AdapterAdmin

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
NOT_THERE: Final = "this router loads no adapters for clients: start it with --runtime-lora, or workers with --lora"


class AdapterBody(Body):
    """What both paths are told."""

    lora_name: Annotated[str, Field(min_length=1)]


class LoadBody(AdapterBody):
    """The body of /v1/load_lora_adapter."""

    lora_path: str  # a PEFT folder, on each worker's machine
    base_model_name: str | None = None  # whose it is, where several models are served


class UnloadBody(AdapterBody):
    """The body of /v1/unload_lora_adapter."""

    lora_int_id: int | None = None  # without effect
    base_model_name: str | None = None  # whose it is, where several models have one of that name


B = TypeVar("B", bound=AdapterBody)
Work = Callable[[B], Awaitable[int]]  # returns how many workers have done it


def add_adapters(app: FastAPI, models: Models, admins: Mapping[Pipeline, AdapterAdmin], bodies: BodyReader) -> None:
    """Add both paths to the application."""

    async def load(body: LoadBody) -> int:
        pipeline = _base(models, body.base_model_name or "")
        _check_free(body.lora_name, pipeline, admins)
        return await admins[pipeline].load(body.lora_name, body.lora_path)

    async def unload(body: UnloadBody) -> int:
        return await admins[_owner(body, models, admins)].unload(body.lora_name)

    app.add_route(LOAD, partial(_answer, bodies, LoadBody, load), methods=["POST"])
    app.add_route(UNLOAD, partial(_answer, bodies, UnloadBody, unload), methods=["POST"])


def refuse_adapters(app: FastAPI) -> None:
    """Add both paths, where clients load no adapters."""
    for path in (LOAD, UNLOAD):
        app.add_route(path, _not_there, methods=["POST"])


async def _not_there(request: Request) -> Response:
    error: DiptychError = NotServed(404, NOT_THERE)
    return refusal(error, request)


def _base(models: Models, name: str) -> Pipeline:
    try:
        pipeline = models.named(name)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param="base_model_name") from None
    if name and name not in pipeline.all_names:
        raise InvalidRequest(f"{name!r} is no model that this router serves", param="base_model_name")
    return pipeline


def _owner(body: UnloadBody, models: Models, admins: Mapping[Pipeline, AdapterAdmin]) -> Pipeline:
    """Return whose adapter it is: also one that only some workers have, so that nobody may ask for it any more."""
    if body.base_model_name:
        return _base(models, body.base_model_name)
    owners = [pipeline for pipeline, admin in admins.items() if admin.is_loaded(body.lora_name)]
    if len(owners) > 1:
        words = f"several models have an adapter {body.lora_name!r}: say whose"
        raise InvalidRequest(words, param="base_model_name")
    return owners[0] if owners else models.named(body.lora_name)


def _check_free(name: str, base: Pipeline, admins: Mapping[Pipeline, AdapterAdmin]) -> None:
    """Raise unless only `base` has, or may get, an adapter of this name: requests say nothing else."""
    others = {pipeline: admin for pipeline, admin in admins.items() if pipeline is not base}
    if any(name in other.all_adapters or admin.is_loaded(name) for other, admin in others.items()):
        raise InvalidRequest(f"another model has an adapter {name!r}: give it another name", param="lora_name")


async def _answer(bodies: BodyReader, fields: type[B], work: Work[B], request: Request) -> Response:
    try:
        body = await _read(bodies, fields, request)
        return json_response({"lora_name": body.lora_name, "num_workers": await work(body)}, request)
    except DiptychError as error:
        return refusal(error, request)


async def _read(bodies: BodyReader, fields: type[B], request: Request) -> B:
    """Read a body; it counts against what bodies may hold until then: an adapter may take minutes to load."""
    held = bodies.hold(caller_of(request).name)
    try:
        return await bodies.read(request, held, partial(read_fields, fields))
    finally:
        held.release()
