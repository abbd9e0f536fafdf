"""How a simulated worker is changed: adapters, of which a path is the fingerprint, and its role. Fails when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from diptych.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2


class SimulatedAdmin(admin_pb2_grpc.WorkerAdminServicer):
    """Implements `diptych.v1.WorkerAdmin`. Change it from its event loop only."""

    def __init__(self, instance: bootstrap_pb2.Instance, on_change: Callable[[], None]) -> None:
        self.failure: grpc.StatusCode | None = None  # of the next loads
        self.num_calls = 0
        self.authorizations: list[str | None] = []  # of the callers who drained it, or changed its role or log level
        self.drains: list[admin_pb2.DrainRequest] = []
        self.profiles: list[admin_pb2.StartProfileRequest] = []
        self.log_level = "info"
        self._instance = instance
        self._on_change = on_change  # called when the record has changed

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Any) -> admin_pb2.LoadLoraResponse:
        self.num_calls += 1
        if self.failure is not None:
            await context.abort(self.failure, "told to fail")
        present = next((adapter for adapter in self._instance.loras if adapter.name == request.name), None)
        if present is not None:
            return admin_pb2.LoadLoraResponse(adapter=present, was_loaded=True)
        adapter = self._instance.loras.add(name=request.name, fingerprint=request.path)
        self._on_change()
        return admin_pb2.LoadLoraResponse(adapter=adapter)

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Any) -> admin_pb2.UnloadLoraResponse:
        self.num_calls += 1
        others = [adapter for adapter in self._instance.loras if adapter.name != request.name]
        if len(others) == len(self._instance.loras):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter {request.name!r} is loaded")
        del self._instance.loras[:]
        self._instance.loras.extend(others)
        self._on_change()
        return admin_pb2.UnloadLoraResponse()

    async def SetRole(self, request: admin_pb2.SetRoleRequest, context: Any) -> admin_pb2.SetRoleResponse:
        """Nothing is drained: what was begun goes on."""
        await self._begin(context)
        previous, self._instance.role = self._instance.role, request.role
        self._on_change()
        return admin_pb2.SetRoleResponse(previous_role=previous)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        """Only noted."""
        await self._begin(context)
        self.drains.append(request)
        return admin_pb2.DrainResponse()

    async def SetLogLevel(self, request: admin_pb2.SetLogLevelRequest, context: Any) -> admin_pb2.SetLogLevelResponse:
        await self._begin(context)
        previous, self.log_level = self.log_level, request.level
        return admin_pb2.SetLogLevelResponse(previous_level=previous)

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Any) -> admin_pb2.FlushCacheResponse:
        await self._begin(context)
        return admin_pb2.FlushCacheResponse(pages=7)

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Any
    ) -> admin_pb2.StartProfileResponse:
        await self._begin(context)
        self.profiles.append(request)
        return admin_pb2.StartProfileResponse(path="/traces/one")

    async def StopProfile(self, request: admin_pb2.StopProfileRequest, context: Any) -> admin_pb2.StopProfileResponse:
        await self._begin(context)
        return admin_pb2.StopProfileResponse(path="/traces/one", bytes=9, num_steps=2, duration_s=0.5)

    async def _begin(self, context: Any) -> None:
        self.num_calls += 1
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        if self.failure is not None:
            await context.abort(self.failure, "told to fail")
