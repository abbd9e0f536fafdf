"""Reflection, under the name that tools ask for first and under the older one. The messages of both are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

NEWER_NAME: Final = "grpc.reflection.v1.ServerReflection"


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
