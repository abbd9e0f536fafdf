"""The gRPC service by which operators change a running worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from diptych.common.errors import DiptychError
from diptych.engine.frontend.drain import WorkerDrain
from diptych.engine.frontend.role_change import RoleChanges
from diptych.engine.frontend.service import Context, WorkerService, name_of, refuse
from diptych.engine.frontend.weight_update import update_weights
from diptych.v1 import admin_pb2, admin_pb2_grpc
from diptych.v1.admin_pb2 import AdminCommand

T = TypeVar("T")


class WorkerAdminService(admin_pb2_grpc.WorkerAdminServicer):
    """Implements `diptych.v1.WorkerAdmin` over the groups of a worker's service."""

    def __init__(self, service: WorkerService, drain: WorkerDrain, roles: RoleChanges) -> None:
        self._service = service
        self._drain = drain
        self._roles = roles

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoadLoraResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.administer(AdminCommand(load_lora=request)))).load_lora

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.UnloadLoraResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.administer(AdminCommand(unload_lora=request)))).unload_lora

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return admin_pb2.ListLorasResponse(adapters=group.describe().loras)

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, context: Context
    ) -> admin_pb2.UpdateWeightsResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return await _answer(context, update_weights(group, request.model, request.drain_ms / 1000))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        if request.instance_id:
            await self._service.find(name_of(request.instance_id), context)
        within_s = request.deadline_ms / 1000 if request.HasField("deadline_ms") else None
        self._drain.ask(within_s, request.instance_id)
        return admin_pb2.DrainResponse()

    async def SetRole(self, request: admin_pb2.SetRoleRequest, context: Context) -> admin_pb2.SetRoleResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        drain_s = request.drain_ms / 1000 if request.HasField("drain_ms") else None
        return await _answer(context, self._roles.set_role(group, request.role, drain_s))


async def _answer(context: Context, work: Coroutine[Any, Any, T]) -> T:
    """Do the work to its end, whether or not the caller waits; end the call with its error, if there is one."""
    try:
        return await asyncio.shield(asyncio.ensure_future(work))
    except DiptychError as error:
        await refuse(context, grpc.StatusCode[error.grpc_status], str(error))
