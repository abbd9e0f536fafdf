"""Change what a running worker serves: `diptych role 127.0.0.1:41234 decode`. It loses no request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.requests.asking import members
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.members.instances import is_meant, name_of
from diptych.common.members.roles import WORKER_ROLES, Role, WorkerRole
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.v1.admin_pb2 import SetRoleRequest, SetRoleResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.bootstrap_pb2 import Instance

MARGIN_S: Final = 60.0  # beyond the drain: for what was handed back to let go, and for links


@dataclass(frozen=True, slots=True)
class RoleConfig(MembersConfig):
    """Have a running worker serve prefill, decode, both (unified), or images (encode), without a restart.

    It takes nothing new, lets what runs finish or hands it back to the routers, and then serves the new role.
    """

    worker: str = argument(REQUIRED, help="instance id (or how it begins), or host:port as `diptych links` shows it")
    role: WorkerRole = argument(REQUIRED, help="prefill, decode, unified or encode")
    drain_s: float = option(30.0, help="for what runs to finish; the rest is handed back")

    def validate(self) -> None:
        if self.drain_s < 0:
            raise ConfigError(f"--drain-s must not be negative, as {self.drain_s} is")


class RoleRefused(DiptychError):
    """The worker serves what it served before."""


def main(config: RoleConfig) -> int:
    """Change the role and say how long it took; return the exit code."""
    config = located(config)
    trust = config.trust()
    worker = find(members(config.bootstrap, trust), config.worker)
    start_s = time.monotonic()
    answer = set_role(worker, Role(config.role), config.drain_s, trust)
    took_s = time.monotonic() - start_s
    print(f"{name_of(worker)} now serves {config.role}, after {took_s:.2f} s")
    if answer.not_ready:
        print(f"it is not ready yet: {answer.not_ready}")
    return 0


def find(listed: Sequence[Instance], wanted: str) -> Instance:
    """Return the worker that is meant. Raises `ConfigError` unless it is exactly one."""
    workers = [each for each in listed if each.role in WORKER_ROLES]
    found = [each for each in workers if is_meant(each, wanted)]
    if len(found) != 1:
        problem = "several workers are" if found else "no worker is"
        listing = "\n  ".join(sorted(map(name_of, found or workers))) or "none"
        raise ConfigError(f"{problem} called {wanted!r}; there are:\n  {listing}")
    return found[0]


def set_role(worker: Instance, role: Role, drain_s: float, trust: Trust) -> SetRoleResponse:
    """Return when the role is served, or might be. Raises `RoleRefused`."""
    request = SetRoleRequest(instance_id=worker.instance_id, role=role.wire, drain_ms=round(drain_s * 1000))
    with open_sync_channel(worker.address, trust) as channel:
        try:
            answer: SetRoleResponse = WorkerAdminStub(channel).SetRole(request, timeout=drain_s + MARGIN_S)
        except grpc.RpcError as error:
            raise RoleRefused(f"{name_of(worker)}: {error.details() or error.code().name}") from None
    return answer
