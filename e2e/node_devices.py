"""Devices that nodes offer and nobody has: Kubernetes counts them as it counts real ones."""

from __future__ import annotations

from cluster import Cluster


def offer(cluster: Cluster, device: str, count: int) -> None:
    """Have each node offer so many."""
    _patch(cluster, device, f'"op": "add", "value": "{count}"')


def withdraw(cluster: Cluster, device: str) -> None:
    _patch(cluster, device, '"op": "remove"')


def _patch(cluster: Cluster, device: str, operation: str) -> None:
    change = f'[{{{operation}, "path": "/status/capacity/{device.replace("/", "~1")}"}}]'
    for node in cluster.get("nodes"):
        name = node["metadata"]["name"]
        cluster.kubectl("patch", "node", name, "--subresource=status", "--type=json", f"--patch={change}")
