"""Says what members are by their records: their names for people, and the measures that pools are scaled by. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from diptych.v1.bootstrap_pb2 import GroupNode, Instance, InstanceState, Role, WorkerLoad

_ROLES: Final[Mapping[int, str]] = {number: name.removeprefix("ROLE_").lower() for name, number in Role.items()}


def role_of(member: Instance) -> str:
    """Return "prefill", "decode", "unified" or "router"; "role 9" for one that only a later version knows."""
    number = member.role
    return _ROLES.get(number) or f"role {number}"


def state_of(member: Instance) -> str:
    """Return "starting", "ready", "draining" or "gone"."""
    return InstanceState.Name(member.state).removeprefix("INSTANCE_STATE_").lower()


def name_of(member: Instance) -> str:
    rank = f"#{member.dp_rank}" if member.dp_rank else ""
    return f"{role_of(member)} {member.instance_id:016x} at {member.address}{rank}"


def ranks_of(node: GroupNode) -> str:
    """Name the ranks of a node of a group: the first and the last."""
    last = node.first_rank + node.num_ranks - 1
    return str(last) if last == node.first_rank else f"{node.first_rank}-{last}"


def is_meant(instance: Instance, wanted: str) -> bool:
    """Whether people mean it: by its pod, by its address, with its rank or without, or by how its id begins."""
    ranked = f"{instance.address}#{instance.dp_rank}"
    names = {instance.address, ranked, instance.pod} - {""}
    return wanted in names or f"{instance.instance_id:016x}".startswith(wanted.lower())


def computable_tokens(load: WorkerLoad) -> int:
    """Return the prompt tokens that wait to be computed and can be.

    Not those whose decode worker has no pages for them yet: more prefill workers would not help them.
    """
    return max(0, load.waiting_tokens - load.blocked_tokens)


def kv_occupancy(load: WorkerLoad) -> float:
    """Return the share of KV pages that are neither free nor evictable; 0 where there is no pool yet."""
    return 1 - load.free_pages / load.total_pages if load.total_pages else 0.0


def kv_demand(load: WorkerLoad) -> float:
    """Return the same with what those without pages will need, if they are like the others: 1.5 is a half too much.

    Occupancy ends at 1, however many wait: a pool that is scaled by it follows a burst step by step, each as long as a
    start.
    """
    num_granted = load.num_running + load.num_waiting - load.num_ungranted
    return kv_occupancy(load) * (1 + load.num_ungranted / max(1, num_granted))


def prompt_budget(load: WorkerLoad) -> float:
    """Return how many tokens of prompts a step may have beside its outputs; infinite: any number."""
    return load.prompt_budget if load.HasField("prompt_budget") else math.inf


def place_of(instance: Instance) -> str:
    """Return what can belong to one instance at a time: the scheduler groups of a worker share an address."""
    return f"{instance.address}#{instance.dp_rank}" if instance.dp_rank else instance.address
