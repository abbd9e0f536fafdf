"""The gRPC service by which operators change a running worker.

`update_weights` replaces the weights: load, take nothing new, let what runs finish, switch, serve again. The old
weights serve until the switch, and after it if anything fails. Nothing mixes: no leg is accepted in between, what still
runs when the time is up is handed back (routers place it elsewhere), and a leg that a router started for the old
weights is refused after the switch by its `compat`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import grpc

from diptych.common.drain.drain import DrainProgress
from diptych.common.errors import DiptychError, Unavailable
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.role_change import RoleChanges
from diptych.engine.frontend.service import Context, WorkerService, name_of, refuse
from diptych.v1 import admin_pb2, admin_pb2_grpc
from diptych.v1.admin_pb2 import (
    AdminCommand,
    DropWeights,
    PrepareWeights,
    SwitchWeights,
    SwitchWeightsResult,
    UpdateWeightsResponse,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_S: Final = 0.05
NUM_TRIES: Final = 200


class WorkerDrain:
    """Drains every scheduler group that lives. Implements `diptych.common.drain.draining.Drainable`."""

    def __init__(self, groups: Callable[[], Sequence[WorkerGroup]], drain_s: float) -> None:
        self._groups = groups
        self._drain_s = drain_s

    def ask(self, within_s: float | None, instance_id: int = 0) -> None:
        """Drain one instance; 0: all of them. Time that is not given is what is configured."""
        for group in self._groups():
            if instance_id in (0, group.instance_id):
                group.departure.draining.ask(self._drain_s if within_s is None else within_s)

    def progress(self) -> Mapping[str, DrainProgress]:
        return {name_of(group.instance_id): group.departure.draining.progress() for group in self._groups()}


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


async def update_weights(group: WorkerGroup, model: str, drain_s: float) -> UpdateWeightsResponse:
    """Serve the weights of `model`. Raises a `DiptychError`; then the old ones are served."""
    if group.updating.locked():
        raise Unavailable("another update is under way")
    async with group.updating:
        await group.administer(AdminCommand(prepare_weights=PrepareWeights(model=model)))
        result = await _replace(group, drain_s)
    return UpdateWeightsResponse(
        model_id=result.model_id, previous_model_id=result.previous_model_id, previous_model=result.previous_model
    )


async def _replace(group: WorkerGroup, drain_s: float) -> SwitchWeightsResult:
    try:
        await group.departure.vacate("its weights are being replaced", drain_s)
        result = await _switch(group)
        group.rename(result.model_id, result.terms)
    except DiptychError as error:
        logger.error("the old weights stay: %s", error)
        await group.administer(AdminCommand(drop_weights=DropWeights()))
        raise
    finally:
        group.departure.resume()
    return result


async def _switch(group: WorkerGroup) -> SwitchWeightsResult:
    """Switch as soon as no request holds KV: an aborted one may still be in a transfer."""
    for _ in range(NUM_TRIES):
        try:
            return (await group.administer(AdminCommand(switch_weights=SwitchWeights()))).switch_weights
        except Unavailable:
            await asyncio.sleep(RETRY_S)
    raise Unavailable(f"aborted requests still hold KV after {NUM_TRIES * RETRY_S:g} s")
