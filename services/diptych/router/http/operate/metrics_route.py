"""What the API's port answers to who asks for metrics: where they are, or with `--open-metrics` the metrics themselves.

They name keys and what each uses, and nobody is asked for a key there: so they belong where no client comes.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.router.http.exchange.errors import plain_error_response
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.process.metrics import PATH

PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
ELSEWHERE: Final = "metrics are at the health port (--health-port) of this router; --open-metrics shows them here, too"


def open_metrics_route(metrics: RouterMetrics) -> Route:
    async def show(request: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": PROMETHEUS_TEXT})

    return Route(PATH, show)


def closed_metrics_route() -> Route:
    async def refuse(request: Request) -> Response:
        return plain_error_response(404, ELSEWHERE, {HEADER: request_id_of(request)})

    return Route(PATH, refuse)
