"""Decides which pods Kubernetes should end first when it scales down: the emptier a worker, the cheaper. Pure.

Costs are coarse, a step for twice as many requests, so that they seldom change: each change is a write to the API. A
worker that drains already is the cheapest: an operator who drains one before scaling down thereby chooses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from diptych.common.members.membership import State
from diptych.common.members.roles import WORKER_ROLES
from diptych.v1.bootstrap_pb2 import Instance

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
LEAVING: Final = -1


def deletion_costs(members: Iterable[Instance]) -> Mapping[str, int]:
    """Return the cost of each worker's pod, by name."""
    by_pod: dict[str, list[Instance]] = {}
    for member in members:
        if member.pod and member.role in WORKER_ROLES:
            by_pod.setdefault(member.pod, []).append(member)
    return {pod: _cost(instances) for pod, instances in by_pod.items()}


def changes(pods: Iterable[Mapping[str, Any]], costs: Mapping[str, int]) -> Mapping[str, int]:
    """Return what has to be written: the costs of pods, as the API lists them, that say something else."""
    found = {pod["metadata"]["name"]: (pod["metadata"].get("annotations") or {}).get(ANNOTATION) for pod in pods}
    return {name: cost for name, cost in costs.items() if name in found and found[name] != str(cost)}


def _cost(instances: Iterable[Instance]) -> int:
    """Return 0 for no request, 1 for one, 2 for two or three, 3 for up to seven, ..."""
    serving = [each for each in instances if State(each.state) in (State.STARTING, State.READY)]
    if not serving:
        return LEAVING
    return sum(each.load.num_running + each.load.num_waiting for each in serving).bit_length()
