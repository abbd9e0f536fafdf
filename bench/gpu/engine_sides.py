"""Engines that are measured beside each other: each in processes of its own, asked through pipes or through HTTP."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
from engine_cases import Asked, Case, Figures, Ready, figures
from pd_site import Site, begin, wait

from diptych.common.net.ports import free_port

HERE: Final = Path(__file__).parent
CLIENTS: Final = 6  # processes that read streams
POLL_S: Final = 0.2
Limits = tuple[int, int]


class Failed(RuntimeError):
    """An engine that ended, or was ended, before it answered."""


class Engine(Protocol):
    """One that runs and can be asked."""

    ready: Ready | None  # its own limits, where it tells them
    ready_s: float  # from its start until it could be asked

    def ask(self, case: Case, num_ids: int, limits: Limits | None = None) -> Figures: ...


class Piped:
    """A child process of `engine_cases.Child`'s kind."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        began_s, self._process = time.perf_counter(), process
        self.ready: Ready | None = Ready(**json.loads(_line(process)))
        self.ready_s = time.perf_counter() - began_s

    def ask(self, case: Case, num_ids: int, limits: Limits | None = None) -> Figures:
        _send(self._process, asdict(Asked(asdict(case), num_ids, limits)))
        return Figures(**json.loads(_line(self._process)))


class Served:
    """An engine behind HTTP, asked by several processes at once."""

    def __init__(self, clients: Sequence[subprocess.Popen[str]], ready_s: float) -> None:
        self.ready: Ready | None = None
        self.ready_s = ready_s
        self._clients = clients

    def ask(self, case: Case, num_ids: int, limits: Limits | None = None) -> Figures:
        asked = Asked(asdict(case), num_ids, limits)
        for client in self._clients:
            _send(client, asdict(asked))
        for client in self._clients:
            _line(client)  # it is ready
        for client in self._clients:
            _send(client, None)
        answers = [json.loads(_line(client)) for client in self._clients]
        failures = [failure for answer in answers for failure in answer["failures"]]
        if failures:
            raise Failed(f"a request failed: {failures[0]}")
        return figures(asked.requests(), 0.0, [stamps for answer in answers for stamps in answer["stamps"]])


@contextmanager
def diptych_engine(folder: str, options: Mapping[str, Any], limit_s: float) -> Iterator[Engine]:
    words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    with _child([sys.executable, str(HERE / "engine_diptych.py"), folder, *words], limit_s) as process:
        yield Piped(process)


@contextmanager
def vllm_engine(python: str, folder: str, limit_s: float) -> Iterator[Engine]:
    with _child([*shlex.split(python), str(HERE / "engine_vllm.py"), folder], limit_s) as process:
        yield Piped(process)


@contextmanager
def diptych_over_http(folder: str, model: str, flags: Mapping[str, Any], limit_s: float) -> Iterator[Engine]:
    """A bootstrap, a router and one worker that does both; `limit_s` is that of each answer."""
    with ExitStack() as stack:
        began_s = time.perf_counter()
        site = Site(folder, flags, with_gpus=flags.get("device") != "cpu")
        (port,) = wait([begin(stack, site, [("unified", 0)], {})])
        ready_s = time.perf_counter() - began_s
        yield Served(stack.enter_context(_clients(port, model, limit_s)), ready_s)


@contextmanager
def vllm_over_http(python: str, folder: str, limit_s: float) -> Iterator[Engine]:
    """`vllm serve`, at its defaults but for weights and tokenizer."""
    port, began_s = free_port("127.0.0.1"), time.perf_counter()
    flags = ["--model", folder, "--load-format", "dummy", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--worker-extension-cls", "engine_vllm.Weights"]
    command = [*shlex.split(python), "-m", "vllm.entrypoints.openai.api_server", *flags, *where]
    with _child(command, limit_s) as process:
        while not _answers(port):
            if process.poll() is not None:
                raise Failed(f"it ended with {process.returncode} before it served")
            time.sleep(POLL_S)
        ready_s = time.perf_counter() - began_s
        if not _answers(port, "POST", "/collective_rpc", '{"method": "fill_weights"}'):
            raise Failed("its weights could not be filled")
        with _clients(port, folder, limit_s) as clients:
            yield Served(clients, ready_s)


def has_vllm(python: str) -> bool:
    """Return whether that interpreter finds vLLM, without importing it."""
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([*shlex.split(python), "-c", found], check=False).returncode == 0


@contextmanager
def _clients(port: int, model: str, limit_s: float) -> Iterator[Sequence[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        command = [sys.executable, str(HERE / "engine_http.py"), str(port), model]
        yield [stack.enter_context(_child([*command, str(part), str(CLIENTS)], limit_s)) for part in range(CLIENTS)]


@contextmanager
def _child(command: Sequence[str], limit_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process, ended with all that it started, after `limit_s` at the latest."""
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # which a server needs to be told to fill its weights
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=HERE, env=environment, stdin=pipe, stdout=pipe, text=True)
    timer = threading.Timer(limit_s, _end, (process.pid,))
    timer.daemon = True
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        _end(process.pid)
        process.communicate()


def _end(pid: int) -> None:
    """Kill it and all its descendants: a GPU's memory must be free for whoever comes next."""
    try:
        process = psutil.Process(pid)
        everyone = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for each in everyone:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(everyone, timeout=10)


def _send(process: subprocess.Popen[str], what: object) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()
    except OSError as error:
        raise Failed("it ended before it was asked") from error


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Failed("it ended, or ran out of time, before it answered")
    return line


def _answers(port: int, method: str = "GET", path: str = "/health", body: str | None = None) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
