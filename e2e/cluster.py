"""A cluster as its operators see it: `kubectl` and `helm`, in one namespace."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Final

TIMEOUT_S: Final = 480
HELM: Final = os.environ.get("DIPTYCH_E2E_HELM", "helm")


class Cluster:
    """What KUBECONFIG leads to."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Return what it prints. Raises `AssertionError` with what it complains of."""
        return _run(("kubectl", "-n", self.namespace, *words), stdin)

    def helm(self, *words: str) -> str:
        return _run((HELM, "-n", self.namespace, *words))

    def get(self, *words: str) -> list[dict[str, Any]]:
        """Return objects: `get("pods", "-l", "a=b")`."""
        return list(json.loads(self.kubectl("get", *words, "-o", "json"))["items"])

    def secret(self, name: str, key: str) -> str:
        encoded = self.kubectl("get", "secret", name, "-o", f"jsonpath={{.data['{key}']}}")
        return base64.b64decode(encoded).decode()

    def wait(self, what: str, condition: str) -> None:
        self.kubectl("wait", what, f"--for={condition}", f"--timeout={TIMEOUT_S}s")

    def rollout(self, deployment: str) -> None:
        """Wait until it is over."""
        self.kubectl("rollout", "status", f"deployment/{deployment}", f"--timeout={TIMEOUT_S}s")

    def see(self, words: str, *command: str) -> str:
        """Return the first line of `kubectl` with these words as soon as it comes. It may go on for ever."""
        with self.begin(*command) as process:
            timer = threading.Timer(TIMEOUT_S, process.terminate)
            timer.start()
            try:
                assert process.stdout is not None
                lines = []
                for line in process.stdout:
                    if words in line:
                        return line
                    lines.append(line)
            finally:
                timer.cancel()
                process.terminate()
        raise AssertionError(f"{words!r} never came:\n{''.join(lines[-30:])}")

    def follow(self, pod: str) -> subprocess.Popen[str]:
        """Start printing its log, until the pod ends or the process is terminated."""
        return self.begin("logs", "--follow", pod)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start `kubectl`. What it prints and what it complains of come together."""
        command = ("kubectl", "-n", self.namespace, *words)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def describe(self) -> str:
        """Return what a person would look at first."""
        return self.kubectl("get", "pods", "-o", "wide") + self.kubectl("get", "events", "--sort-by=.lastTimestamp")

    def drain(self, node: str, selector: str) -> str:
        """Evict the pods of a node, and let their successors start there, too. Return what `kubectl drain` says."""
        flags = (f"--pod-selector={selector}", "--delete-emptydir-data", "--ignore-daemonsets")
        command = ("kubectl", "drain", node, *flags, f"--timeout={TIMEOUT_S}s")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            self.kubectl("wait", f"node/{node}", "--for=jsonpath={.spec.unschedulable}=true")
            self.kubectl("uncordon", node)
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, printed
        return printed


def _run(command: Sequence[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
