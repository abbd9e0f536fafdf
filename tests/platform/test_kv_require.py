"""A worker whose links are slower than `--kv-require` is not ready and says why; others are not affected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.common.trust.tokens import TOKEN_VARIABLE


class Parts:
    """Components that are started one by one."""

    def __init__(self, folder: Path, model: Path, http_port: int, bootstrap_port: int) -> None:
        self.folder, self.model = folder, model
        self.url, self.bootstrap = f"http://127.0.0.1:{http_port}", f"127.0.0.1:{bootstrap_port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("bootstrap", "--port", str(bootstrap_port))
        ports = ("--http-port", str(http_port), "--grpc-port", "0", "--pair-wait-s", "0.2")
        self._start("router", *ports, "--bootstrap", self.bootstrap, "--model", str(model))

    def worker(self, role: str, *options: str) -> Path:
        """Start a worker; return its log."""
        return self._start(role, "--model", str(self.model), "--bootstrap", self.bootstrap, *options)

    def _start(self, component: str, *options: str) -> Path:
        log = self.folder / f"{component}{len(self.processes)}"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "diptych.cli", component, *options]
            self.processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        return log

    def complete(self) -> tuple[int, str]:
        """Return the status and the body of a short completion; 0 while no router answers."""
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def links(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "diptych.cli", "links", "--bootstrap", self.bootstrap, "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        return list(json.loads(answer.stdout))

    def schedulers(self) -> list[psutil.Process]:
        """Whatever the components have started; each component has the token in its own environment."""
        return [child for process in self.processes for child in psutil.Process(process.pid).children(recursive=True)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def state_of(worker: dict[str, Any]) -> tuple[str, str]:
    return str(worker["role"]), str(worker["state"])


@pytest.fixture
def parts(tmp_path: Path, tiny_folder: Path, find_port: Callable[[], int]) -> Iterator[Parts]:
    running = Parts(tmp_path, tiny_folder, find_port(), find_port())
    yield running
    running.stop()


def test_a_worker_on_slow_links_is_not_ready_and_the_others_serve(parts: Parts, wait_for: Callable[..., Any]) -> None:
    small = ("--kv-cache-mib", "8", "--device", "sim")
    parts.worker("decode", *small)
    log = parts.worker("prefill", *small, "--transports", "tcp", "--kv-require", "shm")
    reason = "and --kv-require asks for shm"
    wait_for(lambda: "its pages go over tcp/" in parts.complete()[1], 200.0, "the refusal names the lanes")
    status, words = parts.complete()
    assert status == 503
    assert "1 not ready (" in words
    assert reason in words
    assert reason in log.read_text()
    decode, prefill = sorted(parts.links(), key=lambda worker: str(worker["role"]))
    assert (decode["state"], prefill["state"]) == ("starting", "starting")  # the decode worker has nobody else
    assert reason in prefill["not_ready"]
    assert reason in prefill["links"][0]["reason"]

    parts.worker("prefill", *small, "--kv-require", "shm", "--kv-path", "message")
    wait_for(lambda: parts.complete()[0] == 200, 200.0, "the worker with a fast link serves")
    states = [("decode", "ready"), ("prefill", "ready"), ("prefill", "starting")]
    wait_for(lambda: sorted(map(state_of, parts.links())) == states, 200.0, "bootstrap has heard of it")
    workers = sorted(parts.links(), key=state_of)
    (link,) = [each for each in workers[1]["links"] if each["peer"] == workers[0]["instance_id"]]
    assert (link["state"], link["path"], [test["path"] for test in link["tests"]]) == ("up", "message", ["message"])
    schedulers = parts.schedulers()
    assert len(schedulers) == 3
    assert [each for each in schedulers if os.environ[TOKEN_VARIABLE] in str(each.environ())] == []
