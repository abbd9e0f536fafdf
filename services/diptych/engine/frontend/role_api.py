"""The roles of a worker over HTTP: GET tells them; POST changes one and answers when it is served. Both want the token.

    POST /role?role=decode&drain_s=5   {"instance": "9f2c...", "role": "decode", "previous_role": "prefill",
                                        "not_ready": ""}

A worker with several instances wants to know which: `&instance=9f2c...`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route

from diptych.common.errors import InvalidRequest, NotFound
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route, seconds
from diptych.common.trust.trust import Trust
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.role_change import RoleChanges
from diptych.engine.frontend.service import WorkerService, name_of


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
