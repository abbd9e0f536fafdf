"""Scales pools as KEDA would, where it is not installed: by the chart's ScaledObjects, over what pods tell.

Each second the pages of all pods are read, with the labels that the chart's monitors add, and each trigger's query is
evaluated. A trigger above its `activationThreshold` makes a pool active: one that has ended is brought up. A pool
without one for `cooldownPeriod` ends. Else the autoscaler's formula counts: the largest ceil(value / threshold).
Not here: what KEDA does where a query fails, and the autoscaler's pace.
"""

from __future__ import annotations

import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import promql
from cluster import Cluster
from promql import Scrape

EVERY_S: Final = 1.0
KEEPS_S: Final = 300.0  # longer than any query looks back
PORTS: Final = {"router": 8081, "worker": 9100, "bootstrap": 8081}
GROUP: Final = "keda.sh"


def kind() -> dict[str, Any]:
    """Return the kind of ScaledObjects, without its schema."""
    names = {"kind": "ScaledObject", "plural": "scaledobjects", "singular": "scaledobject"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    metadata = {"name": f"scaledobjects.{GROUP}"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": spec,
    }


def wanted(spec: dict[str, Any], scrapes: Sequence[Scrape], replicas: int, idle_s: float) -> int:
    """Return how many workers a pool should have that has so many, and was active last so long ago."""
    values = [(each["metadata"], _number(each["metadata"]["query"], scrapes)) for each in spec["triggers"]]
    if not is_active(spec, scrapes):
        return 0 if idle_s >= spec["cooldownPeriod"] and not spec["minReplicaCount"] else replicas
    most = max(math.ceil(value / float(trigger["threshold"])) for trigger, value in values)
    return int(min(max(most, spec["minReplicaCount"], 1), spec["maxReplicaCount"]))


def is_active(spec: dict[str, Any], scrapes: Sequence[Scrape]) -> bool:
    triggers = [each["metadata"] for each in spec["triggers"]]
    return any(_number(each["query"], scrapes) > float(each.get("activationThreshold", 0)) for each in triggers)


def _number(query: str, scrapes: Sequence[Scrape]) -> float:
    """Return the one number that KEDA takes. Raises `ValueError` where there is another number of them."""
    found = promql.evaluate(query, list(scrapes))
    if isinstance(found, float):
        return found
    (value,) = found.values()
    return value


class Keda:
    """Scales from `start` to `close`, in a thread of its own."""

    def __init__(self, cluster: Cluster, release: str) -> None:
        self._cluster = cluster
        self._selector = f"app.kubernetes.io/instance={release}"
        self._labels = {"namespace": cluster.namespace, "app_kubernetes_io_instance": release}
        self._scrapes: list[Scrape] = []
        self._active_s: dict[str, float] = {}  # by Deployment: when it was active last
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(EVERY_S):
            now_s = time.monotonic()
            self._scrapes = [each for each in self._scrapes if each.time_s > now_s - KEEPS_S]
            self._scrapes.append(Scrape(now_s, self._samples()))
            for each in self._cluster.get("scaledobjects"):
                self._see_to(each["spec"], now_s)

    def _see_to(self, spec: dict[str, Any], now_s: float) -> None:
        name = spec["scaleTargetRef"]["name"]
        since_s = self._active_s.setdefault(name, now_s)
        if is_active(spec, self._scrapes):
            since_s = self._active_s[name] = now_s
        replicas = self._replicas(name)
        should = wanted(spec, self._scrapes, replicas, now_s - since_s)
        if should != replicas:
            self._cluster.kubectl("scale", f"deployment/{name}", f"--replicas={should}")

    def _replicas(self, deployment: str) -> int:
        return int(self._cluster.kubectl("get", f"deployment/{deployment}", "-o", "jsonpath={.spec.replicas}"))

    def _samples(self) -> promql.Vector:
        found: promql.Vector = {}
        for pod in self._cluster.get("pods", "-l", self._selector):
            port = PORTS.get(pod["metadata"]["labels"]["app.kubernetes.io/component"])
            page = _page(f"{pod['status'].get('podIP')}:{port}")
            found |= promql.samples_of(page, {**self._labels, "pod": pod["metadata"]["name"]})
        return found


def _page(address: str) -> str:
    """Return nothing of a pod that does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=2.0) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return ""
