"""What a router says of itself to whoever asks: that it is alive, whether it is ready, its version, APIs and metrics.

Metrics name keys and what each uses, and nobody is asked for a key here: so they belong where no client comes, and
`/metrics` says where they are. With `--open-metrics` it shows them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypedDict

from diptych.common.verdicts.probes import Probes
from diptych.common.version import own_version
from diptych.router.http.exchange.answers import NotServed, json_response, refusal
from diptych.router.metrics import RouterMetrics
from diptych.router.process.health import PATH, TEXT, ProcessMetrics
from diptych.router.process.share import Share

ELSEWHERE: Final = "metrics are at the health port (--health-port) of this router; --open-metrics shows them here, too"


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
    return json_response(Version(version=own_version()), request)


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


def metrics_route(metrics: RouterMetrics | None) -> Route:
    """Return the path; without `metrics` it says where they are."""

    async def show(request: Request) -> Response:
        if metrics is None:
            return refusal(NotServed(404, ELSEWHERE), request)
        return Response(metrics.exposition(), headers={"content-type": TEXT})

    return Route(PATH, show)


def with_all_metrics(app: ASGIApp, metrics: RouterMetrics, of_all: ProcessMetrics, share: Share) -> ASGIApp:
    """Return the application of one of several processes, with the metrics of all of them at their shared port.

    At its own port it shows those of the one process.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["server"][1] == share.own_port:
            return await app(scope, receive, send)
        page = await asyncio.to_thread(of_all.exposition, {share.index: metrics.exposition()})
        return await Response(page, headers={"content-type": TEXT})(scope, receive, send)

    return serve
