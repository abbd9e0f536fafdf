"""A platform for fault drills: workers that can be killed, stopped and cut off, on hosts of their own where possible.

As root the hosts are those of a `Network`, whose links can be cut. Otherwise all of them are this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
import psutil
from chaos_network import HERE, Host, Network

from diptych.common.lifecycle import PARENT_PID_VARIABLE
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc

WORKER_PORT: Final = 7100
MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
WORKER_OPTIONS: Final = {
    "load-format": "dummy",
    "kv-cache-mib": 8,  # 512 pages: pages in quarantine hurt
    "kv-integrity": "always",
    "max-step-tokens": 64,  # a prompt takes several steps: faults find it half written
    "log-format": "json",
}


class Component:
    """A `diptych` command that runs as a session of its own, and can be started again."""

    def __init__(self, name: str, host: Host, command: Sequence[object], log: Path) -> None:
        self.name = name
        self.host = host
        self._command = (*host.enter, sys.executable, "-m", "diptych.cli", *map(str, command))
        self._log = log
        self.num_starts = 0
        self.start()

    def __str__(self) -> str:
        return self.name

    def start(self) -> None:
        self.num_starts += 1
        environment = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill_one(self, rng: random.Random) -> None:
        """kill -9 its frontend or a scheduler; the rest has to notice and to end."""
        process = psutil.Process(self._process.pid)
        rng.choice([process, *process.children()]).kill()

    def stop(self, rng: random.Random) -> None:
        """SIGSTOP all of it, or only its schedulers."""
        process = psutil.Process(self._process.pid)
        schedulers = process.children()
        for each in rng.choice([schedulers, [process, *schedulers]]):
            each.suspend()

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self._process.pid, number)


class Worker(Component):
    """A prefill or decode worker."""

    def __init__(self, role: str, number: int, host: Host, options: dict[str, object], log: Path) -> None:
        port = WORKER_PORT if host.name else free_port()
        self.role = role
        self.address = f"{host.address}:{port}"
        where = {"host": host.address, "port": port}
        super().__init__(f"{role}#{number}", host, (role, *_flags({**options, **where})), log)


class Cluster:
    """Bootstrap, router and workers. `close` leaves nothing."""

    def __init__(self, folder: Path, num_prefill: int, num_decode: int, transports: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.network = Network() if Network.is_possible() else None
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(MODEL))
        centre = Host("", Network.CENTRE) if self.network else HERE
        ports = {"host": centre.address, "http-port": free_port(), "grpc-port": free_port()}
        self.url = f"http://{centre.address}:{ports['http-port']}"
        self._bootstrap = f"{centre.address}:{free_port()}"
        base = {"model": self.model, "bootstrap": self._bootstrap}
        options = {**base, **WORKER_OPTIONS, "transports": transports}
        host, port = self._bootstrap.split(":")
        bootstrap = Component("bootstrap", centre, ("bootstrap", "--host", host, "--port", port), folder / "bootstrap")
        self.workers = [
            Worker(role, number, self._new_host(), options, folder / f"{role}{number}")
            for role, count in (("prefill", num_prefill), ("decode", num_decode))
            for number in range(1, count + 1)
        ]
        flags = _flags({**base, **ports, "load-format": "dummy", "log-format": "json"})
        router = Component("router", centre, ("router", *flags), folder / "router")
        self._components = [router, *self.workers, bootstrap]

    def _new_host(self) -> Host:
        return self.network.add_host() if self.network else HERE

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def restart_dead(self) -> None:
        for worker in self.workers:
            if not worker.is_running:
                worker.start()

    async def members(self) -> list[bootstrap_pb2.Instance]:
        """The workers that bootstrap lists."""
        async with grpc.aio.insecure_channel(self._bootstrap) as channel:
            stub = bootstrap_pb2_grpc.BootstrapStub(channel)
            async for update in stub.Watch(bootstrap_pb2.WatchRequest(), timeout=10, wait_for_ready=True):
                return [each for each in update.upserts if each.role != bootstrap_pb2.ROLE_ROUTER]
        raise AssertionError("bootstrap said nothing")

    async def well(self) -> set[str]:
        """The addresses of workers that are ready and linked to every peer."""
        members = [each for each in await self.members() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
        ids = {role: {each.instance_id for each in members if each.role == role} for role in (1, 2)}
        peers = {1: ids[2], 2: ids[1]}
        return {each.address for each in members if set(each.load.linked_instances) >= peers[each.role] != set()}

    async def statuses(self) -> list[worker_pb2.WorkerStatus]:
        """What each listed worker that serves says of itself. Raises `NoAnswer`."""
        starting = bootstrap_pb2.INSTANCE_STATE_STARTING
        return [await _status(member) for member in await self.members() if member.state != starting]

    def close(self) -> None:
        for component in self._components:
            component.kill()


class NoAnswer(Exception):
    """A worker that is listed does not answer."""


async def _status(member: bootstrap_pb2.Instance) -> worker_pb2.WorkerStatus:
    request = worker_pb2.StatusRequest(instance_id=member.instance_id)
    async with grpc.aio.insecure_channel(member.address) as channel:
        try:
            status: worker_pb2.WorkerStatus = await worker_pb2_grpc.WorkerStub(channel).GetStatus(request, timeout=2)
        except grpc.aio.AioRpcError as error:
            raise NoAnswer(f"{member.instance_id:016x} at {member.address}: {error.details()}") from None
        return status


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flags(options: dict[str, object]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]
