"""Changes what a running worker serves: take nothing new, let what runs finish or hand it back, serve the new role.

Model and KV cache stay: nothing is loaded, and peers of former requests are still answered. The record tells
routers and peers of each step: paused, then the new role, and not ready until a link that the role needs is up.

Over HTTP, GET tells the roles of a worker; POST changes one and answers when it is served. Both want the token.

    POST /role?role=decode&drain_s=5   {"instance": "9f2c...", "role": "decode", "previous_role": "prefill",
                                        "not_ready": ""}

A worker with several instances wants to know which: `&instance=9f2c...`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.routing import Route

from diptych.common.errors import Conflict, InvalidRequest, NotFound, Unavailable
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route, seconds
from diptych.common.trust.trust import Trust
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.service import WorkerService, name_of
from diptych.v1.admin_pb2 import SetRoleResponse

logger = logging.getLogger(__name__)

MIN_UNIFIED_REQUESTS: Final = 2  # so that a prompt of another worker finds a row while one decodes
LINK_WAIT_S: Final = 10.0  # for a link that the new role needs, before the answer is that there is none


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """How the roles of a worker may change."""

    drain_s: float  # for what runs to finish, unless the caller says it
    obstacles: Mapping[Role, str] = field(default_factory=dict)  # roles that can't be served, and why

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
                self._check(group, role)
                await _change(group, role, self.drain_s if drain_s is None else drain_s)
            not_ready = await group.wait_for_link(LINK_WAIT_S)
        return SetRoleResponse(previous_role=previous.wire, not_ready=not_ready)

    def _check(self, group: WorkerGroup, role: Role) -> None:
        if not group.is_loaded:
            raise Unavailable("the model is loading")
        if group.departure.draining.has_begun:
            raise Conflict("the worker is draining")
        if role in self.obstacles:
            raise Conflict(self.obstacles[role])


def role_changes(config: WorkerConfig) -> RoleChanges:
    """Return how the roles of a configured worker may change."""
    obstacles: dict[Role, str] = {}
    if config.max_requests is not None and config.max_requests < MIN_UNIFIED_REQUESTS:
        obstacles[Role.UNIFIED] = "a unified worker needs --max-requests 2 at least: one to decode, one to prefill"
    return RoleChanges(config.drain_s, obstacles)


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
    try:
        return Role(name)
    except ValueError:
        names = ", ".join(role.value for role in Role)
        raise InvalidRequest(f"role must be one of {names}, not {name!r}", param="role") from None


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
