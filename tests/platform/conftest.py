"""The whole platform as its users start it: `diptych up` with the small model, real processes, real UCX."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest
from reference_engines import reference_engines

from diptych.cli.platform.local_platforms import LocalPlatform, running, runtime_folder
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.net.ports import free_port
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.common.trust.trust import Trust, TrustConfig
from diptych.engine import Engine
from diptych.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 300.0
WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
"""
LEAVING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.CANCELLED)  # what such members say
DEFAULTS = {"DIPTYCH_KV_INTEGRITY": "always", "DIPTYCH_KV_CACHE_MIB": "64"}  # of every platform; filling 512 takes 2 s


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return `condition()` as soon as it is true; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)
    return value


def listening(process: psutil.Process) -> set[int]:
    """The ports at which a process takes connections."""
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


class Platform:
    """A running platform, and what a test may do to it."""

    def __init__(
        self, log: Path, *, prefill: int = 1, decode: int = 1, options: tuple[str, ...] = (), **variables: str
    ) -> None:
        self.http_port, self.grpc_port, self.bootstrap_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.grpc_target = f"127.0.0.1:{self.grpc_port}"
        self.log = log
        ports = ("--http-port", self.http_port, "--grpc-port", self.grpc_port, "--bootstrap-port", self.bootstrap_port)
        sizes = ("--prefill", prefill, "--decode", decode)
        command = [sys.executable, "-m", "diptych.cli", "up", *map(str, (*ports, *sizes)), *options]
        own = {"XDG_RUNTIME_DIR": str(log.parent)}
        environment = {**DEFAULTS, **os.environ, **own, **variables}
        self._makes_tokens = not environment.get(TOKEN_VARIABLE)
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_for(lambda: self._is_up(prefill + decode), START_TIMEOUT_S, "every worker is routable")
        except BaseException as error:
            self.stop()
            raise AssertionError(f"the platform did not start:\n{self.log.read_text()[-5000:]}") from error

    def _is_up(self, num_workers: int) -> bool:
        """Tell whether all workers are ready: the router is as soon as the first pair is."""
        assert self.process.poll() is None, self.log.read_text()[-5000:]
        if not self.is_ready():
            return False
        ready = [each for each in self.instances() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
        return sum(each.role in WORKER_ROLES for each in ready) >= num_workers

    def token_file(self, party: str = "operator") -> Path:
        """Return where a token lies that it has made: those of an operator are what commands find."""
        found = wait_for(self._announcement, START_TIMEOUT_S, "the platform is announced")
        return Path(found.trust["DIPTYCH_AUTH_TOKEN_FILE"]).with_name(party)

    def _announcement(self) -> LocalPlatform | None:
        platforms = running(runtime_folder({"XDG_RUNTIME_DIR": str(self.log.parent)}))
        return next((each for each in platforms if each.grpc == self.grpc_target), None)

    def trust(self, party: str = "operator") -> Trust:
        """What a member or a command of this platform has."""
        return TrustConfig(auth_token_file=self.token_file(party) if self._makes_tokens else None).trust()

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=200) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def num_open_legs(self) -> int:
        """Legs that workers have not ended, as the router knows."""
        lines = [line for line in self.metrics().splitlines() if line.startswith("diptych_router_legs_open{")]
        return sum(int(float(line.split()[1])) for line in lines)

    def metrics(self) -> str:
        """What Prometheus finds where the router says that it is."""
        (router,) = [each for each in self.instances() if each.role == bootstrap_pb2.ROLE_ROUTER]
        with urllib.request.urlopen(f"http://{router.metrics_address}/metrics", timeout=200) as answer:
            return str(answer.read().decode())

    def wait_until_ready(self) -> None:
        wait_for(self.is_ready, 200.0, "the platform is routable again")

    def post(self, path: str, body: Any, *, timeout_s: float = 200.0, headers: dict[str, str] | None = None) -> Any:
        """Return (status, parsed body). `body` is JSON, or bytes to send as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self, prompt: str | list[int], max_tokens: int = 8, **fields: Any) -> Any:
        """Return the parsed answer of a greedy completion that must succeed, with timings."""
        body = {"model": "", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}  # the only model
        status, answer = self.post("/v1/completions", body, headers={"x-diptych-timings": "1"})
        assert status == 200, answer
        return answer

    def model_id(self) -> str:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=200) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def components(self, name: str) -> list[psutil.Process]:
        """The processes that run `diptych NAME`. One that ends while it is looked at runs nothing."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also of one that is a zombie
                if name in child.cmdline()[2:5]:
                    found.append(child)
        return found

    def process_of(self, name: str, worker: bootstrap_pb2.Instance) -> psutil.Process:
        """The process that runs `diptych NAME` and listens at the worker's address."""
        port = int(worker.address.rpartition(":")[2])
        return next(each for each in self.components(name) if port in listening(each))

    def tree(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self, name: str) -> int:
        """kill -9 one process of a component; return its pid."""
        victim = self.components(name)[0]
        victim.send_signal(signal.SIGKILL)
        return int(victim.pid)

    def instances(self) -> list[bootstrap_pb2.Instance]:
        with open_sync_channel(f"127.0.0.1:{self.bootstrap_port}", self.trust()) as channel:
            stub = bootstrap_pb2_grpc.BootstrapStub(channel)
            updates = stub.Watch(bootstrap_pb2.WatchRequest(), timeout=200, wait_for_ready=True)
            update: bootstrap_pb2.WatchUpdate = next(updates)
            updates.cancel()
            return list(update.upserts)

    def statuses(self) -> list[worker_pb2.WorkerStatus]:
        """What each worker says of itself."""
        workers = [instance for instance in self.instances() if instance.role in WORKER_ROLES]
        return [self._status(worker) for worker in workers]

    def _status(self, worker: bootstrap_pb2.Instance) -> worker_pb2.WorkerStatus:
        with open_sync_channel(worker.address, self.trust()) as channel:
            status: worker_pb2.WorkerStatus = worker_pb2_grpc.WorkerStub(channel).GetStatus(
                worker_pb2.StatusRequest(instance_id=worker.instance_id), timeout=200
            )
            return status

    def assert_clean(self, timeout_s: float = 200.0) -> None:
        """Wait until no room is open, then check every page on both sides."""
        try:
            statuses = wait_for(self._idle_statuses, timeout_s, "every room has ended")
        except AssertionError as error:
            raise AssertionError(f"{error}; now: {self.statuses()}\n{self.log.read_text()[-6000:]}") from None
        for status in statuses:
            assert list(status.problems) == []
            held = {state: n for state, n in status.pages_by_state.items() if state not in ("free", "cached")}
            assert held == {"owned": 0, "importing": 0, "quarantined": 0, "exporting": 0}
            assert (status.leaks_found, status.integrity_failures) == (0, 0)

    def _idle_statuses(self) -> list[worker_pb2.WorkerStatus]:
        """What the workers say, once every member answers and none has an open room; until then nothing."""
        try:
            statuses = self.statuses()
        except grpc.RpcError as error:
            if error.code() not in LEAVING:
                raise
            return []  # a killed worker is a member until its lease runs out
        return statuses if all(status.open_rooms == 0 for status in statuses) else []

    def drain(self, worker: bootstrap_pb2.Instance, deadline_s: float) -> None:
        """Have a worker leave, and stay until it is stopped."""
        request = admin_pb2.DrainRequest(instance_id=worker.instance_id, deadline_ms=round(deadline_s * 1000))
        with open_sync_channel(worker.address, self.trust()) as channel:
            admin_pb2_grpc.WorkerAdminStub(channel).Drain(request, timeout=200)

    def is_empty(self, worker: bootstrap_pb2.Instance) -> bool:
        """Whether a worker that drains holds nothing any more."""
        return self._status(worker).drain.phase == worker_pb2.Drain.PHASE_EMPTY

    def stop(self) -> int:
        """Ctrl-C; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(200)
        except subprocess.TimeoutExpired:
            for process in self.tree():
                process.kill()
            raise


@pytest.fixture(scope="package")
def reference() -> Iterator[Callable[..., Engine]]:
    """`reference(folder, **options)`: an engine of one process, whose tokens those of a platform are."""
    with reference_engines() as engine_of:
        yield engine_of


@pytest.fixture(scope="session", name="wait_for")
def _wait_for() -> Callable[..., Any]:
    return wait_for


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One platform for all tests that leave it as they found it, with room for the model's whole context."""
    shared = Platform(tmp_path_factory.mktemp("platform") / "log", DIPTYCH_KV_CACHE_MIB="512")
    yield shared
    shared.stop()


@pytest.fixture(scope="package")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform without torch, whose model is simulated and has two names; it makes a token for each kind of member.

    Tests leave it as they found it. `test_console_cache.py` counts all that was ever asked, and comes first.
    """
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    names = ("--served-model-name", "ours,org/other", "--max-model-len", "4000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("DIPTYCH_SIM_TIMING", "none")
        patch.setenv("DIPTYCH_KV_CACHE_MIB", "16")
        patch.delenv(TOKEN_VARIABLE)
        shared = Platform(folder / "log", options=("--model", "sim", "--device", "sim", *names))
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def openai_client(platform: Platform) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the shared platform. A failure is one: nothing is tried again."""
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def openai_model(openai_client: openai.OpenAI) -> str:
    return openai_client.models.list().data[0].id


@pytest.fixture(scope="session")
def find_port() -> Callable[[], int]:
    """Return a port that nobody listens on."""
    return free_port


@pytest.fixture(scope="session")
def platform_class() -> type[Platform]:
    """For tests that share a platform of their own kind."""
    return Platform


@pytest.fixture
def start_platform(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """Start a platform of one's own, to be killed and maimed."""
    with platforms(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Platform]]:
    """The same for all tests of a file, each of which leaves a platform that serves."""
    with platforms(tmp_path_factory.mktemp("platforms")) as start:
        yield start


@contextlib.contextmanager
def platforms(folder: Path) -> Iterator[Callable[..., Platform]]:
    started: list[Platform] = []

    def start(**sizes: Any) -> Platform:
        started.append(Platform(folder / f"log{len(started)}", **sizes))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any], float, str], Any]:
    return wait_for


@pytest.fixture(scope="session", autouse=True)
def _quiet_grpc() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
