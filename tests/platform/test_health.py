"""Every component of a platform that serves is live, started and ready, and says so without a token."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from diptych.common.net.ports import free_port

Platform = Any


def ask(port: int, name: str) -> tuple[int, str] | None:
    """None: this port does not serve health."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/{name}", timeout=200) as answer:
            return answer.status, json.load(answer)["reason"]
    except urllib.error.HTTPError as error:
        with error:
            return (error.code, json.load(error)["reason"]) if error.code == 503 else None
    except (OSError, http.client.HTTPException):  # a gRPC port
        return None


def health_port(platform: Platform, name: str) -> int:
    (component,) = platform.components(name)
    ports = [each.laddr.port for each in component.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return int(next(port for port in sorted(ports) if ask(port, "live") and port != platform.http_port))


@pytest.mark.parametrize("name", ["bootstrap", "prefill", "decode", "router"])
def test_a_component_of_a_platform_that_serves_is_well(
    platform: Platform, name: str, wait_until: Callable[..., Any]
) -> None:
    port = health_port(platform, name)
    wait_until(lambda: ask(port, "ready")[0] == 200, 200.0, "a router has acknowledged it")  # type: ignore[index]
    answers = [ask(port, each) for each in ("live", "startup", "ready")]
    assert [answer and answer[0] for answer in answers] == [200, 200, 200]


def test_a_worker_that_ends_answers_probes_until_its_scheduler_has_ended(wait_until: Callable[..., Any]) -> None:
    port = free_port()
    options = ("--device=sim", "--model=sim", f"--bootstrap=127.0.0.1:{free_port()}", "--port=0")
    command = (sys.executable, "-m", "diptych.cli", "decode", *options, f"--health-port={port}")
    with subprocess.Popen(command) as worker:
        try:
            wait_until(
                lambda: worker.poll() is not None or ask(port, "startup") == (200, "loaded"),
                200.0,
                "its model is loaded",
            )
            schedulers = psutil.Process(worker.pid).children()
            assert schedulers
            worker.terminate()
            wait_until(lambda: ask(port, "live") != (200, "every loop runs"), 200.0, "its probes end")
            assert ask(port, "live") is None, "a bad answer would have it restarted"
            assert [each for each in schedulers if is_there(each)] == []
            assert worker.wait(200) == 0
        finally:
            worker.kill()


def is_there(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
