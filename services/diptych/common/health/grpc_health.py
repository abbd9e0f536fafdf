"""Serves the standard gRPC health service (`grpc.health.v1`) from a component's probes.

"" and "liveness" tell whether the process lives, "readiness" and the full name of each service whether work sent here
now would be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.event_loop import wait_or_timeout
from diptych.common.verdicts.probes import Probes

WATCH_S: Final = 0.5  # how late a watcher may hear of a change

Request: TypeAlias = health_pb2.HealthCheckRequest
Response: TypeAlias = health_pb2.HealthCheckResponse


class GrpcHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Implements `grpc.health.v1.Health`. `services` are full names."""

    def __init__(self, probes: Probes, services: Iterable[str]) -> None:
        names = {"": probes.live, "liveness": probes.live, "readiness": probes.ready}
        self._probes = {**names, **dict.fromkeys(services, probes.ready)}
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Serve no longer, and let watchers go: their calls would hold up the end of a server."""
        self._closed.set()

    async def Check(self, request: Request, context: Any) -> Response:
        status = self._status(request.service)
        if status == Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is: {', '.join(filter(None, self._probes))}")
        return Response(status=status)

    async def Watch(self, request: Request, context: Any) -> AsyncIterator[Response]:
        last = None
        while not self._closed.is_set():
            status = self._status(request.service)
            if status != last:
                yield Response(status=status)
            last = status
            await wait_or_timeout(self._closed, WATCH_S)
        yield Response(status=Response.NOT_SERVING)

    def _status(self, service: str) -> Any:
        probe = self._probes.get(service)
        if probe is None:
            return Response.SERVICE_UNKNOWN
        is_good = not self._closed.is_set() and probe().is_good
        return Response.SERVING if is_good else Response.NOT_SERVING


def add_health(server: grpc.aio.Server, probes: Probes, services: Iterable[str]) -> GrpcHealth:
    """Serve health on `server`."""
    health = GrpcHealth(probes, services)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return health
