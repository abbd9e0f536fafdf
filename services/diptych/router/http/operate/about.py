"""What a router says of itself to whoever asks: that it is alive, whether it is ready, its version and its APIs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.common.health.probes import Probes
from diptych.router.http.exchange.json_response import json_response


class Status(TypedDict):
    """The answer of /health."""

    status: str


class Readiness(TypedDict):
    """The answer of /ready."""

    ready: bool
    reason: str


class Version(TypedDict):
    """The answer of /version."""

    version: str


class Welcome(TypedDict):
    """The answer of the address alone: what the server is, its APIs, and where to look further."""

    name: str
    apis: list[str]
    models: str
    openapi: str
    ready: str
    health: str


def add_about(app: FastAPI, probes: Probes, apis: Sequence[str]) -> None:
    """Add the paths to the application. A route that takes GET takes HEAD as well."""
    for path in ("/health", "/ping"):  # the second in SageMaker's words
        app.add_route(path, _alive, methods=["GET", "POST"] if path == "/ping" else ["GET"])
    app.add_route("/ready", partial(_ready, probes), methods=["GET"])
    app.add_route("/version", _version, methods=["GET"])
    app.add_route("/", partial(_welcome, apis), methods=["GET"])


async def _alive(request: Request) -> Response:
    """The process is alive; says nothing of workers."""
    return Response(orjson.dumps(Status(status="ok")), media_type="application/json")


async def _ready(probes: Probes, request: Request) -> Response:
    """A request that came now could be served."""
    verdict = probes.ready()
    body: Readiness = {"ready": verdict.is_good, "reason": verdict.reason}
    return Response(orjson.dumps(body), 200 if verdict.is_good else 503, media_type="application/json")


async def _version(request: Request) -> Response:
    return json_response(Version(version=version("diptych")), request)


async def _welcome(apis: Sequence[str], request: Request) -> Response:
    """For who opens the address in a browser, or asks it what it is."""
    welcome: Welcome = {
        "name": "diptych",
        "apis": list(apis),
        "models": "/v1/models",
        "openapi": "/openapi.json",
        "ready": "/ready",
        "health": "/health",
    }
    return json_response(welcome, request)
