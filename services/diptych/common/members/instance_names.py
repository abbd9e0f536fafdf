"""Names members for people."""

from __future__ import annotations

from diptych.v1.bootstrap_pb2 import Instance, InstanceState, Role


def role_of(member: Instance) -> str:
    """Return "prefill", "decode", "unified" or "router"; "role 9" for one that only a later version knows."""
    if member.role not in Role.values():
        return f"role {member.role}"
    return Role.Name(member.role).removeprefix("ROLE_").lower()


def state_of(member: Instance) -> str:
    """Return "starting", "ready", "draining" or "gone"."""
    return InstanceState.Name(member.state).removeprefix("INSTANCE_STATE_").lower()


def name_of(member: Instance) -> str:
    rank = f"#{member.dp_rank}" if member.dp_rank else ""
    return f"{role_of(member)} {member.instance_id:016x} at {member.address}{rank}"


def is_meant(instance: Instance, wanted: str) -> bool:
    """Whether people mean it: by its pod, by its address, with its rank or without, or by how its id begins."""
    ranked = f"{instance.address}#{instance.dp_rank}"
    names = {instance.address, ranked, instance.pod} - {""}
    return wanted in names or f"{instance.instance_id:016x}".startswith(wanted.lower())
