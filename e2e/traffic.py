"""The traffic under which operations are tested: a pod that runs `traffic_pod.py`, and what it reports.

Rule: a request belongs to the operation if it was open at any moment of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster import TIMEOUT_S, Cluster
from release import NAME

SCRIPT: Final = Path(__file__).with_name("traffic_pod.py")
POD: Final = "traffic"
NUM_CLIENTS: Final = 6
POLL_S: Final = 0.5

Line = dict[str, Any]


@dataclass(slots=True)
class Window:
    """What became of the requests of an operation."""

    took_s: float = 0.0
    offered: int = 0
    answered: int = 0
    failed: int = 0
    wrong: int = 0
    tried_again: int = 0
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = (f"{name} {getattr(self, name)}" for name in ("offered", "answered", "failed", "wrong", "tried_again"))
        return f"{self.took_s:6.1f} s  {', '.join(counts)}, slowest {self.slowest_s:.1f} s"


class Traffic:
    """Known-answer requests without a pause."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def start(self, image: str) -> None:
        """Return when answers come."""
        self._cluster.apply(_script(), _pod(image))
        self._cluster.kubectl("wait", f"pod/{POD}", "--for=condition=Ready", f"--timeout={TIMEOUT_S}s")
        self._wait_for(lambda lines: bool(lines) and lines[-1]["answered"] > NUM_CLIENTS)

    def stop(self) -> None:
        self._cluster.kubectl("delete", f"pod/{POD}", f"configmap/{POD}", "--grace-period=0", "--force")

    @contextmanager
    def watched(self) -> Iterator[Window]:
        """Yield what is filled in once the block is done and every request of it has ended."""
        window, began_s, first = Window(), time.monotonic(), len(self._lines())
        yield window
        window.took_s = time.monotonic() - began_s
        count = len(self._lines()) + 1  # a line later all requests of the block are in `offered`
        offered = self._wait_for(lambda lines: len(lines) >= count)[-1]["offered"]
        _fill(window, self._wait_for(lambda lines: _ended(lines[-1]) >= offered), first)

    def _wait_for(self, is_enough: Callable[[list[Line]], bool]) -> list[Line]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_enough(lines := self._lines()):
            assert time.monotonic() < deadline_s, lines[-3:]
            time.sleep(POLL_S)
        return lines

    def _lines(self) -> list[Line]:
        printed = self._cluster.kubectl("logs", POD).splitlines()
        return [json.loads(line) for line in printed if line.startswith("{")]


def _ended(line: Line) -> int:
    return int(line["answered"] + line["failed"] + line["wrong"])


def _fill(window: Window, lines: list[Line], first: int) -> None:
    before, after = lines[first - 1], lines[-1]
    for name in ("offered", "answered", "failed", "wrong", "tried_again"):
        setattr(window, name, after[name] - before[name])
    window.slowest_s = max(line["slowest_s"] for line in lines[first:])
    window.problems = [problem for line in lines[first:] for problem in line["problems"]]


def _script() -> dict[str, Any]:
    data = {SCRIPT.name: SCRIPT.read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": POD}, "data": data}


def _pod(image: str) -> dict[str, Any]:
    secret = {"name": f"{NAME}-diptych-api-keys", "key": "key"}
    container = {
        "name": POD,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", f"/e2e/{SCRIPT.name}", f"{NAME}-diptych-router", "8000", "9000", str(NUM_CLIENTS)],
        "env": [{"name": "DIPTYCH_API_KEY", "valueFrom": {"secretKeyRef": secret}}],
        "volumeMounts": [{"name": "script", "mountPath": "/e2e"}],
    }
    volumes = [{"name": "script", "configMap": {"name": POD}}]
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD}, "spec": spec}
