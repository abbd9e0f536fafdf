"""Loading and unloading adapters over HTTP, by vLLM's paths. Present only with `--runtime-lora`.

Who may call it can make workers read any folder: it belongs behind a gateway that lets only operators through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.errors import error_response
from diptych.router.http.exchange.json_response import json_response
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.http.fields.strict_model import Body
from diptych.router.workers.adapter_admin import AdapterAdmin

B = TypeVar("B", bound=Body)


class LoadBody(Body):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str  # a PEFT folder, on each worker's machine


class UnloadBody(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # without effect


def add_adapters(app: FastAPI, admin: AdapterAdmin, bodies: BodyReader) -> None:
    """Add both paths to the application."""

    async def load(request: Request) -> Response:
        async def work() -> object:
            body = await _fields(request, bodies, LoadBody)
            num_workers = await admin.load(body.lora_name, body.lora_path)
            return {"lora_name": body.lora_name, "num_workers": num_workers}

        return await _answer(request, work)

    async def unload(request: Request) -> Response:
        async def work() -> object:
            body = await _fields(request, bodies, UnloadBody)
            return {"lora_name": body.lora_name, "num_workers": await admin.unload(body.lora_name)}

        return await _answer(request, work)

    app.add_route("/v1/load_lora_adapter", load, methods=["POST"])
    app.add_route("/v1/unload_lora_adapter", unload, methods=["POST"])


async def _fields(request: Request, bodies: BodyReader, model: type[B]) -> B:
    held = bodies.hold(caller_of(request).name)
    try:
        return await bodies.read(request, held, partial(read_fields, model))
    finally:
        held.release()


async def _answer(request: Request, work: Callable[[], Awaitable[object]]) -> Response:
    try:
        return json_response(await work(), request)
    except DiptychError as error:
        return error_response(error, {HEADER: request_id_of(request)})
