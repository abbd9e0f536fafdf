"""Runs the gRPC API: Inference, health checks and reflection. The moment to stop is the caller's."""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health

from diptych.common.grpc_health import add_health
from diptych.common.probes import Probes
from diptych.common.rpc import listen
from diptych.common.trust import INSECURE
from diptych.router.grpc.inference import InferenceService
from diptych.router.grpc.reflection import add_reflection
from diptych.v1 import inference_pb2, inference_pb2_grpc

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class GrpcServer:
    """The client-facing gRPC server. `start` it, `stop` it.

    After `max_connection_s` a client is told to open another connection for its next calls; running ones go on. Busy
    clients would else keep to a router that drains until it is gone.
    """

    def __init__(
        self,
        service: InferenceService,
        probes: Probes,
        host: str,
        port: int,
        *,
        max_message_bytes: int,
        max_connection_s: float,
        shared: bool = False,
    ) -> None:
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_connection_age_ms", round(max_connection_s * 1000)),  # the running calls' time has no bound
            ("grpc.so_reuseport", int(shared)),  # a second server on a port must fail, not share its clients
        )
        self._server = grpc.aio.server(options=options)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, self._server)
        self._health = add_health(self._server, probes, (SERVICE,))
        add_reflection(self._server, (SERVICE, health.SERVICE_NAME))
        self.port = listen(self._server, host, port, INSECURE)  # clients are no members

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; end the running ones after `grace_s`."""
        self._health.close()
        await self._server.stop(grace_s)
