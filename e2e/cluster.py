"""A cluster as its operators see it: `kubectl` and `helm`, in one namespace."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any, Final

TIMEOUT_S: Final = 240


class Cluster:
    """What KUBECONFIG leads to."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Return what it prints. Raises `AssertionError` with what it complains of."""
        return _run(("kubectl", "-n", self.namespace, *words), stdin)

    def helm(self, *words: str) -> str:
        return _run(("helm", "-n", self.namespace, *words))

    def get(self, *words: str) -> list[dict[str, Any]]:
        """Return objects: `get("pods", "-l", "a=b")`."""
        return list(json.loads(self.kubectl("get", *words, "-o", "json"))["items"])

    def wait(self, what: str, condition: str) -> None:
        self.kubectl("wait", what, f"--for={condition}", f"--timeout={TIMEOUT_S}s")

    def rollout(self, deployment: str) -> None:
        """Wait until it is over."""
        self.kubectl("rollout", "status", f"deployment/{deployment}", f"--timeout={TIMEOUT_S}s")

    def follow(self, pod: str) -> subprocess.Popen[str]:
        """Start printing its log, until the pod ends or the process is terminated."""
        command = ("kubectl", "-n", self.namespace, "logs", "--follow", pod)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def describe(self) -> str:
        """Return what a person would look at first."""
        return self.kubectl("get", "pods", "-o", "wide") + self.kubectl("get", "events", "--sort-by=.lastTimestamp")

    def drain(self, node: str, selector: str) -> None:
        """Evict the pods of a node as `kubectl drain` does; let their successors start there, too."""
        command = (
            "kubectl",
            "drain",
            node,
            f"--pod-selector={selector}",
            "--delete-emptydir-data",
            "--ignore-daemonsets",
        )
        with subprocess.Popen((*command, f"--timeout={TIMEOUT_S}s"), stdout=subprocess.PIPE, text=True) as process:
            self.kubectl("wait", f"node/{node}", "--for=jsonpath={.spec.unschedulable}=true")
            self.kubectl("uncordon", node)
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, printed


def _run(command: Sequence[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
