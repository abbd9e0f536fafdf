"""Does on workers what operators ask for in the console, in their name: each call carries the operator's own header.

So a worker decides by itself whether the caller may do it. Each act leaves a line in the log: who, what, where, and
what came of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc

from diptych.common.errors import (
    Conflict,
    DeadlineExceeded,
    DiptychError,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from diptych.common.logging import LogLevel
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import Trust
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.fleet import Fleet
from diptych.v1.admin_pb2 import DrainRequest, SetLogLevelRequest, SetRoleRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 10.0
ROLE_TIMEOUT_S: Final = 600.0  # it is drained before, for as long as the worker's own --drain-s says

_ERRORS: Final = {
    each.grpc_status: each
    for each in (Conflict, DeadlineExceeded, Forbidden, InternalError, InvalidRequest, NotFound, Overloaded)
}


@dataclass(frozen=True, slots=True)
class Actor:
    """In whose name something is done."""

    authorization: str | None
    address: str  # where the call came from, for the log


@dataclass(frozen=True, slots=True)
class RoleChange:
    """What became of a change of role."""

    previous: str
    not_ready: str  # why it can't serve in the new role yet; empty: it does


class Acts:
    """What can be done to workers. Each raises what the worker answered; `NotFound`; `Unavailable`."""

    def __init__(self, fleet: Fleet, trust: Trust, adapters: AdapterAdmin) -> None:
        self._fleet = fleet
        self._trust = trust
        self._adapters = adapters

    async def drain(self, actor: Actor, instance: str, deadline_s: float | None) -> None:
        """Begin a drain; `deadline_s` None: what the worker was started with."""
        deadline_ms = None if deadline_s is None else round(deadline_s * 1000)
        request = DrainRequest(instance_id=self._id(instance), deadline_ms=deadline_ms)
        with _logged(actor, "drain", instance):
            await self._call(actor, instance, lambda stub: stub.Drain(request, timeout=CALL_TIMEOUT_S))

    async def set_role(self, actor: Actor, instance: str, role: Role) -> RoleChange:
        """Return when the new role is served, after the drain."""
        request = SetRoleRequest(instance_id=self._id(instance), role=role.wire)
        with _logged(actor, f"role {role.value}", instance):
            answer = await self._call(actor, instance, lambda stub: stub.SetRole(request, timeout=ROLE_TIMEOUT_S))
        return RoleChange(WORKER_ROLES[answer.previous_role].value, answer.not_ready)

    async def set_log_level(self, actor: Actor, instance: str, level: LogLevel) -> str:
        """Return the level of before."""
        request = SetLogLevelRequest(instance_id=self._id(instance), level=level)
        with _logged(actor, f"log level {level}", instance):
            answer = await self._call(actor, instance, lambda stub: stub.SetLogLevel(request, timeout=CALL_TIMEOUT_S))
        return str(answer.previous_level)

    async def load_adapter(self, actor: Actor, name: str, path: str) -> int:
        """Return on how many workers it is loaded: on all, or it raises."""
        with _logged(actor, f"load adapter {name!r} from {path!r}", "all"):
            return await self._adapters.on_behalf_of(actor.authorization).load(name, path)

    async def unload_adapter(self, actor: Actor, name: str) -> int:
        """Return on how many workers it was loaded."""
        with _logged(actor, f"unload adapter {name!r}", "all"):
            return await self._adapters.on_behalf_of(actor.authorization).unload(name)

    def _id(self, instance: str) -> int:
        """Return the instance that is written so, if it is a worker's."""
        known = {f"{session.instance_id:016x}": session.instance_id for session in self._fleet.sessions()}
        if instance not in known:
            raise NotFound(f"no worker is called {instance!r}: it may have left")
        return known[instance]

    async def _call(self, actor: Actor, instance: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        address = self._fleet.session(self._id(instance)).worker.record.address
        async with open_channel(address, self._trust.on_behalf_of(actor.authorization)) as channel:
            try:
                return await call(WorkerAdminStub(channel))
            except grpc.aio.AioRpcError as error:
                kind = _ERRORS.get(error.code().name, Unavailable)
                raise kind(error.details() or error.code().name) from None


@contextmanager
def _logged(actor: Actor, what: str, instance: str) -> Generator[None, None, None]:
    """Write down what came of an act."""
    result = "done"
    try:
        yield
    except DiptychError as error:
        result = f"{type(error).__name__}: {error}"
        raise
    except BaseException as error:
        result = type(error).__name__
        raise
    finally:
        logger.info("act of operator at %s: %s, instance %s: %s", actor.address, what, instance, result)
