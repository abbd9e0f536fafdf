"""What operators change of a running worker, by gRPC or HTTP: its adapters, its weights, its role; or that it drains.

`RoleChanges` changes what is served: take nothing new, let what runs finish or hand it back, serve the new role. Model
and KV cache stay: nothing is loaded, and peers of former requests are still answered. The record tells routers and
peers of each step: paused, then the new role, and not ready until a link that the role needs is up.

Over HTTP, GET tells the roles of a worker; POST changes one and answers when it is served. Both want the token.

    POST /role?role=decode&drain_s=5   {"instance": "9f2c...", "role": "decode", "previous_role": "prefill",
                                        "not_ready": ""}

A worker with several instances wants to know which: `&instance=9f2c...`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
from starlette.requests import Request
from starlette.routing import Route

from diptych.common.errors import ConfigError, Conflict, DiptychError, InvalidRequest, NotFound, Unavailable
from diptych.common.logging import LEVELS, set_level
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route, seconds
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.drain import DrainProgress
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.service import Context, WorkerService, name_of, refuse
from diptych.engine.frontend.weights.weight_changes import update_weights
from diptych.v1 import admin_pb2, admin_pb2_grpc, engine_pb2
from diptych.v1.admin_pb2 import (
    AdminCommand,
    SetRoleResponse,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

LINK_WAIT_S: Final = 10.0  # for a link that the new role needs, before the answer is that there is none


class WorkerDrain:
    """Drains every scheduler group that lives. Implements `diptych.common.draining.Drainable`."""

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


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """How the roles of a worker may change."""

    drain_s: float  # for what runs to finish, unless the caller says it
    check: Callable[[Role], None]  # raises `ConfigError` for a role that the model or the options rule out

    async def set_role(self, group: WorkerGroup, wanted: int, drain_s: float | None) -> SetRoleResponse:
        """Serve the role of that number. Raises a `DiptychError`; then the former one is served."""
        role = WORKER_ROLES.get(wanted)
        if role is None:
            names = ", ".join(role.value for role in WORKER_ROLES.values())
            raise InvalidRequest(f"a worker's role is one of {names}", param="role")
        if group.updating.locked():
            raise Unavailable("another change of this worker is under way")
        async with group.updating:
            previous = group.role
            if role is not previous:
                _check(group)
                self._check_role(role)
                await _change(group, role, self.drain_s if drain_s is None else drain_s)
            not_ready = await group.wait_for_link(LINK_WAIT_S)
        return SetRoleResponse(previous_role=previous.wire, not_ready=not_ready)

    def _check_role(self, role: Role) -> None:
        try:
            self.check(role)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="role") from None


class WorkerAdminService(admin_pb2_grpc.WorkerAdminServicer):
    """Implements `diptych.v1.WorkerAdmin` over the groups of a worker's service."""

    def __init__(self, service: WorkerService, drain: WorkerDrain, roles: RoleChanges) -> None:
        self._service = service
        self._drain = drain
        self._roles = roles

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoadLoraResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.queries.administer(AdminCommand(load_lora=request)))).load_lora

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.UnloadLoraResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.queries.administer(AdminCommand(unload_lora=request)))).unload_lora

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return admin_pb2.ListLorasResponse(adapters=group.describe().loras)

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, context: Context
    ) -> admin_pb2.UpdateWeightsResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return await _answer(context, update_weights(group, request))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        if request.instance_id:
            await self._service.find(name_of(request.instance_id), context)
        within_s = request.deadline_ms / 1000 if request.HasField("deadline_ms") else None
        self._drain.ask(within_s, request.instance_id)
        return admin_pb2.DrainResponse()

    async def SetRole(self, request: admin_pb2.SetRoleRequest, context: Context) -> SetRoleResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        drain_s = request.drain_ms / 1000 if request.HasField("drain_ms") else None
        return await _answer(context, self._roles.set_role(group, request.role, drain_s))

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return await _answer(context, set_log_level(group, request.level))

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.queries.administer(AdminCommand(flush_cache=request)))).flush_cache

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.queries.administer(AdminCommand(start_profile=request)))).start_profile

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Context
    ) -> admin_pb2.StopProfileResponse:
        group = await self._service.find(name_of(request.instance_id), context)
        return (await _answer(context, group.queries.administer(AdminCommand(stop_profile=request)))).stop_profile


async def _answer(context: Context, work: Coroutine[Any, Any, T]) -> T:
    """Do the work to its end, whether or not the caller waits; end the call with its error, if there is one."""
    try:
        return await asyncio.shield(asyncio.ensure_future(work))
    except DiptychError as error:
        await refuse(context, grpc.StatusCode[error.grpc_status], str(error))


async def set_log_level(group: WorkerGroup, level: str) -> admin_pb2.SetLogLevelResponse:
    """Log from a level on, here and in the scheduler of a group. Raises `InvalidRequest`."""
    if level not in LEVELS:
        raise InvalidRequest(f"a log level is one of {', '.join(LEVELS)}, not {level!r}", param="level")
    await group.scheduler.send(engine_pb2.SchedulerCommands(log_level=level))
    previous = set_level(level)
    logger.info("%s logs from level %s on; before, it was %s", group, level, previous)
    return admin_pb2.SetLogLevelResponse(previous_level=previous)


def _check(group: WorkerGroup) -> None:
    if not group.is_loaded:
        raise Unavailable("the model is loading")
    if group.departure.draining.has_begun:
        raise Conflict("the worker is draining")


async def _change(group: WorkerGroup, role: Role, drain_s: float) -> None:
    logger.info("%s changes its role from %s to %s", group, group.role.value, role.value)
    try:
        await group.departure.vacate(f"it changes its role to {role.value}", drain_s)
        if group.departure.draining.has_begun:
            raise Conflict("the worker has begun to drain")
        await group.serve(role)
    finally:
        group.departure.resume()


def role_route(service: WorkerService, changes: RoleChanges, trust: Trust, refusals: Refusals) -> Route:
    """Return the path for both methods."""

    async def handle(request: Request) -> Answer:
        if request.method != "POST":
            return 200, {name_of(each.instance_id): each.role.value for each in service.groups()}
        group = _find(service, request.query_params.get("instance"))
        role = _role(request.query_params.get("role", ""))
        done = await changes.set_role(group, role.wire, seconds(request, "drain_s"))
        return 200, {
            "instance": name_of(group.instance_id),
            "role": role.value,
            "previous_role": WORKER_ROLES[done.previous_role].value,
            "not_ready": done.not_ready,
        }

    return operator_route("/role", ("GET", "POST"), handle, trust, refusals)


def _role(name: str) -> Role:
    roles = {role.value: role for role in WORKER_ROLES.values()}
    if name not in roles:
        raise InvalidRequest(f"role must be one of {', '.join(roles)}, not {name!r}", param="role")
    return roles[name]


def _find(service: WorkerService, name: str | None) -> WorkerGroup:
    groups = {name_of(group.instance_id): group for group in service.groups()}
    if name is None and len(groups) == 1:
        return next(iter(groups.values()))
    here = ", ".join(groups) or "none"
    if name is None:
        raise InvalidRequest(f"say which with instance=...; there is: {here}", param="instance")
    if name not in groups:
        raise NotFound(f"no instance {name} here; there is: {here}")
    return groups[name]
