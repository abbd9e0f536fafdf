"""Runs the gRPC API: Inference, health checks and reflection. The moment to stop is the caller's.
Reflection has the name that tools ask for first and the older one. The messages of both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

from diptych.common.health.grpc_health import add_health
from diptych.common.health.probes import Probes
from diptych.common.net.descriptors import connections_within
from diptych.common.net.rpc import guarded_server, listen
from diptych.common.trust.trust import INSECURE
from diptych.router.grpc.gate import CallGate
from diptych.router.grpc.inference import InferenceService
from diptych.v1 import inference_pb2, inference_pb2_grpc

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
NEWER_NAME: Final = "grpc.reflection.v1.ServerReflection"


class GrpcServer:
    """The client-facing gRPC server. `start` it, `stop` it.

    After `max_connection_s` a client is told to open another connection for its next calls; running ones go on. Busy
    clients would else keep to a router that drains until it is gone.
    """

    def __init__(
        self,
        service: InferenceService,
        gate: CallGate,
        probes: Probes,
        host: str,
        port: int,
        *,
        max_message_bytes: int,
        max_connection_s: float,
        max_connections: int,
        shared: bool = False,
    ) -> None:
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_connection_age_ms", round(max_connection_s * 1000)),  # the running calls' time has no bound
            ("grpc.max_allowed_incoming_connections", connections_within(max_connections)),
            ("grpc.so_reuseport", int(shared)),  # processes of one router share it
        )
        self._server = guarded_server(gate, options)
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


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    names = (*services, reflection.SERVICE_NAME, NEWER_NAME)
    reflection.enable_server_reflection(names, server)
    info = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,  # type: ignore[attr-defined]
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(NEWER_NAME, {"ServerReflectionInfo": info})
    server.add_generic_rpc_handlers((handler,))
