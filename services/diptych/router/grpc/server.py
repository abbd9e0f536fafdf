"""Runs the gRPC API: Inference, health checks and reflection. The moment to stop is the caller's."""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from diptych.common.rpc import listen
from diptych.router.fleet import Fleet
from diptych.router.grpc.inference import InferenceService
from diptych.v1 import inference_pb2, inference_pb2_grpc

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class GrpcServer:
    """The client-facing gRPC server. `start` it, `report_health`, `stop` it."""

    def __init__(self, service: InferenceService, host: str, port: int, *, max_message_bytes: int) -> None:
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),  # a second server on a port must fail, not share its clients
        )
        self._server = grpc.aio.server(options=options)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        inference_pb2_grpc.add_InferenceServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = listen(self._server, host, port)

    async def start(self) -> None:
        await self._server.start()

    async def report_health(self, fleet: Fleet) -> None:
        """Keep the health service current: the process ("") always serves, Inference while a pair may. Endless."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", serving)
        while True:
            is_routable = bool(fleet.pairs())
            await self._health.set(SERVICE, serving if is_routable else not_serving)
            while bool(fleet.pairs()) is is_routable:
                await fleet.wait_for_change()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; end the running ones after `grace_s`."""
        await self._server.stop(grace_s)
