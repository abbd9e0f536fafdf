"""The HTTP application of a worker: `/metrics` for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.metrics import WorkerMetrics
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.v1.worker_pb2 import WorkerStatus

ANSWER_S: Final = 2.0  # that a scheduler gets; it answers between two steps


def metrics_app(metrics: WorkerMetrics, groups: Callable[[], Iterable[WorkerGroup]]) -> Starlette:
    """Return the application. `groups` are asked how they are at each scrape."""

    async def scrape(request: Request) -> Response:
        asked = list(groups())
        answers = await asyncio.gather(*map(_status, asked))
        statuses = {group.dp_rank: answer for group, answer in zip(asked, answers, strict=True)}
        return Response(metrics.exposition(statuses), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Starlette(routes=[Route("/metrics", scrape)])


async def _status(group: WorkerGroup) -> WorkerStatus | None:
    """Return None for a scheduler that is loading, busy, stopped or dead."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await group.status()
    except (TimeoutError, SchedulerDied):
        return None
