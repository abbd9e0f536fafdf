"""Gives a cluster's autoscaler what workers tell, as the Prometheus adapter would, where that is not installed.

The cluster serves a file as its custom metrics API: `{"NAMESPACE/POD/METRIC": value}`. Every few seconds the workers'
`/metrics` are asked, and it is written anew. Pods that do not answer have no values, several schedulers their mean.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from statistics import mean
from typing import Final

from cluster import Cluster
from prometheus_client.parser import text_string_to_metric_families

WORKERS: Final = "app.kubernetes.io/component=worker"
PORT: Final = 9100
INTERVAL_S: Final = 3.0
ANSWER_S: Final = 2.0
METRICS: Final = (
    "diptych_worker_prefill_backlog_seconds",
    "diptych_worker_prefill_busy_ratio",
    "diptych_worker_kv_demand_ratio",
)


class CustomMetrics:
    """Asks from `start` to `close`, in a thread of its own."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self._cluster = cluster
        self._path = path
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Leave the file as it was: without values."""
        self._is_closed.set()
        self._thread.join()
        self._path.write_text("{}")

    def _run(self) -> None:
        while not self._is_closed.wait(INTERVAL_S):
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(self._values()))
            written.replace(self._path)

    def _values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for pod in self._cluster.get("pods", "-l", WORKERS):
            where = f"{self._cluster.namespace}/{pod['metadata']['name']}"
            samples = _samples(pod["status"].get("podIP", ""))
            values |= {f"{where}/{name}": mean(found) for name, found in samples.items()}
        return values


def _samples(address: str) -> dict[str, list[float]]:
    """Return what a pod says of each metric; nothing if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}:{PORT}/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return {}
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in METRICS:
                samples.setdefault(sample.name, []).append(sample.value)
    return samples
