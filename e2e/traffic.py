"""The traffic under which operations are tested: a pod that runs `traffic_pod.py`, and what it reports.

Rule: a request belongs to the operation if it was open at any moment of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster import Cluster
from log import Line, Log
from release import NAME

SCRIPT: Final = Path(__file__).with_name("traffic_pod.py")  # others of pods may import it


@dataclass(frozen=True, slots=True)
class Kind:
    """How many ask at once, for how many tokens, with how many: fewest and most; and whose silence counts as hung.

    `pool` is the declared pool that requests name; empty: none.
    """

    num_clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    hung_s: int = 60
    pool: str = ""


USUAL: Final = Kind(num_clients=6, prompt=(8, 400), output=(4, 100))
LONG_S: Final = 90.0
LONG: Final = Kind(num_clients=6, prompt=(8, 40), output=(235, 245), hung_s=240)


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


def assert_harmless(window: Window) -> None:
    assert window.answered > 0
    assert (window.failed, window.wrong, window.tried_again) == (0, 0, 0), window.problems


def assert_harmless_to_long_streams(window: Window) -> None:
    assert window.slowest_s > LONG_S
    assert_harmless(window)


class Traffic:
    """Known-answer requests without a pause. `script` runs in the pod, and prints what `traffic_pod.py` prints."""

    def __init__(self, cluster: Cluster, name: str, kind: Kind, script: Path = SCRIPT) -> None:
        self._cluster = cluster
        self._name = name
        self._kind = kind
        self._script = script
        self._log: Log | None = None

    def start(self, image: str) -> None:
        """Return when answers come."""
        self._cluster.apply(_scripts(self._name, self._script), _pod(self._name, self._kind, image, self._script.name))
        self._cluster.wait(f"pod/{self._name}", "condition=Ready")
        self._log = Log(self._cluster.follow(self._name))
        self._log.wait_for(lambda lines: bool(lines) and lines[-1]["answered"] > self._kind.num_clients)

    def stop(self) -> None:
        """Do nothing if it does not run."""
        if self._log is not None:
            self._log.close()
            self._log = None
            self._cluster.kubectl(
                "delete", f"pod/{self._name}", f"configmap/{self._name}", "--grace-period=0", "--force"
            )

    @contextmanager
    def watched(self) -> Iterator[Window]:
        """Yield what is filled in once the block is done and every request of it has ended."""
        assert self._log is not None
        window, began_s, first = Window(), time.monotonic(), len(self._log.so_far())
        try:
            yield window
            window.took_s = time.monotonic() - began_s
            self._see_out()
        finally:
            _fill(window, self._log.so_far(), first)

    def _see_out(self) -> None:
        assert self._log is not None
        count = len(self._log.so_far()) + 1  # a line later all requests of the block are in `offered`
        offered = self._log.wait_for(lambda lines: len(lines) >= count)[-1]["offered"]
        self._log.wait_for(lambda lines: _ended(lines[-1]) >= offered)


def _ended(line: Line) -> int:
    return int(line["answered"] + line["failed"] + line["wrong"])


def _fill(window: Window, lines: list[Line], first: int) -> None:
    before, after = lines[first - 1], lines[-1]
    for name in ("offered", "answered", "failed", "wrong", "tried_again"):
        setattr(window, name, after[name] - before[name])
    window.slowest_s = max((line["slowest_s"] for line in lines[first:]), default=0.0)
    window.problems = [problem for line in lines[first:] for problem in line["problems"]]


def _scripts(name: str, *scripts: Path) -> dict[str, Any]:
    data = {script.name: script.read_text() for script in (SCRIPT, *scripts)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def _pod(name: str, kind: Kind, image: str, script: str) -> dict[str, Any]:
    secret = {"name": f"{NAME}-diptych-api-keys", "key": "key"}
    numbers = [str(number) for number in (kind.num_clients, kind.hung_s, *kind.prompt, *kind.output)]
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", f"/e2e/{script}", f"{NAME}-diptych-router", "8000", "9000", *numbers],
        "env": [
            {"name": "DIPTYCH_API_KEY", "valueFrom": {"secretKeyRef": secret}},
            {"name": "POOL", "value": kind.pool},
        ],
        "volumeMounts": [{"name": "script", "mountPath": "/e2e"}],
    }
    volumes = [{"name": "script", "configMap": {"name": name}}]
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@contextmanager
def harmless_load(cluster: Cluster, kind: Kind, image: str) -> Iterator[Window]:
    """More traffic, of which no request fails either. The window is filled in when the block has ended."""
    more = Traffic(cluster, "load", kind)
    more.start(image)
    try:
        with more.watched() as window:
            yield window
    finally:
        more.stop()
    assert_harmless(window)
