"""Who is alive, as one bootstrap replica lists them, and how a member is called in what people read."""

from __future__ import annotations

from typing import Final

import grpc

from diptych.common.errors import ConfigError
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.bootstrap_pb2_grpc import BootstrapStub

ANSWER_S: Final = 10.0


def members(address: str) -> list[Instance]:
    """Ask a replica. Raises `ConfigError` if none answers there."""
    with grpc.insecure_channel(address) as channel:
        try:
            updates = BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest(), timeout=ANSWER_S)
            snapshot: bootstrap_pb2.WatchUpdate = next(updates)
            updates.cancel()
        except grpc.RpcError as error:
            raise ConfigError(f"no bootstrap answers at {address}: {error.details()}") from None
        return list(snapshot.upserts)


def role_of(member: Instance) -> str:
    """Return "prefill", "decode" or "router"."""
    return bootstrap_pb2.Role.Name(member.role).removeprefix("ROLE_").lower()


def name_of(member: Instance) -> str:
    rank = f"#{member.dp_rank}" if member.dp_rank else ""
    return f"{role_of(member)} {member.instance_id:016x} at {member.address}{rank}"
