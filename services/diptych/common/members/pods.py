"""Compares the pods of workers, as EndpointSlices name them, with the members that bootstrap lists. Pure.

Rule: Kubernetes' word never beats a lease. An instance that a replica lists is alive, whatever its pod's readiness;
only one that no replica can vouch for, because the one that listed it is away, is removed when its pod is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

from diptych.v1.bootstrap_pb2 import Instance

GROUP: Final = "apis/discovery.k8s.io/v1"
KIND: Final = "endpointslices"


@dataclass(frozen=True, slots=True)
class Pod:
    """One endpoint of a Service."""

    name: str
    address: str
    is_ready: bool


def pods_of(slices: Iterable[Mapping[str, Any]]) -> dict[str, Pod]:
    """Return the pods in EndpointSlices, as the API lists them, by name. Those that are being ended are among them."""
    pods: dict[str, Pod] = {}
    for endpoint in (each for slice_ in slices for each in slice_.get("endpoints") or ()):
        target = endpoint.get("targetRef") or {}
        if target.get("kind") == "Pod":
            is_ready = (endpoint.get("conditions") or {}).get("ready") is not False  # not told counts as ready
            pods[target["name"]] = Pod(target["name"], endpoint["addresses"][0], is_ready)
    return pods


def vanished(retained: Iterable[Instance], seen: Set[str], pods: Mapping[str, Pod]) -> set[int]:
    """Return those of the instances that no replica vouches for whose pods, `seen` once, are there no more."""
    return {each.instance_id for each in retained if each.pod in seen and each.pod not in pods}


def unregistered(pods: Mapping[str, Pod], members: Iterable[Instance]) -> list[Pod]:
    """Return the pods of which no member says that it, or a node of its group, runs there."""
    registered = {pod for member in members for pod in (member.pod, *(node.pod for node in member.nodes))}
    return [pod for name, pod in sorted(pods.items()) if name not in registered]
