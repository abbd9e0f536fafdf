"""The platform of a drill: bootstrap replicas, routers and workers, each on a host of its own where possible.

As root the hosts are those of a `Network`, whose links can be cut. Otherwise all of them are this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import httpx

from diptych.common.net.ports import free_port
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import Trust, TrustConfig
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc
from drill.component import Component
from drill.network import HERE, Host, Network

READY_TIMEOUT_S: Final = 300.0
HUNG_S: Final = 180.0  # what takes longer hangs, however busy the machine; what takes less is counted, not judged
POLL_S: Final = 0.1
ANSWER_TIMEOUT_S: Final = 60.0
WORKER_OPTIONS: Final = {
    "kv-cache-mib": 8,  # 512 pages: pages in quarantine hurt
    "kv-integrity": "always",
    "max-step-tokens": 64,  # a prompt takes several steps: faults find it half written
}
ROLES: Final = {"prefill": bootstrap_pb2.ROLE_PREFILL, "decode": bootstrap_pb2.ROLE_DECODE}
PREFILLS: Final = {bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_UNIFIED}
DECODES: Final = {bootstrap_pb2.ROLE_DECODE, bootstrap_pb2.ROLE_UNIFIED}
PEERS: Final = {  # of each role
    bootstrap_pb2.ROLE_PREFILL: DECODES,
    bootstrap_pb2.ROLE_DECODE: PREFILLS,
    bootstrap_pb2.ROLE_UNIFIED: PREFILLS | DECODES,
}


class NoAnswer(Exception):
    """A component that should serve does not answer."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each."""

    bootstrap: int = 2
    router: int = 2
    prefill: int = 2
    decode: int = 2


class Bootstrap(Component):
    """A replica of the membership service."""

    def __init__(self, name: str, host: Host, log: Path, options: Mapping[str, object], trust: Trust) -> None:
        port = free_port()
        self.address = f"{host.address}:{port}"
        self._trust = trust
        super().__init__("bootstrap", name, host, {**options, "host": host.address, "port": port}, log)

    async def members(self) -> list[bootstrap_pb2.Instance]:
        """The workers that it lists. Raises `NoAnswer`."""
        async with open_channel(self.address, self._trust) as channel:
            stub = bootstrap_pb2_grpc.BootstrapStub(channel)
            try:
                async for update in stub.Watch(bootstrap_pb2.WatchRequest(), timeout=ANSWER_TIMEOUT_S):
                    return [each for each in update.upserts if each.role in PEERS]
            except grpc.aio.AioRpcError as error:
                raise NoAnswer(f"{self}: {error.details()}") from None
        raise NoAnswer(f"{self} said nothing")


class Router(Component):
    """A front door."""

    def __init__(self, name: str, host: Host, log: Path, options: Mapping[str, object]) -> None:
        ports = {"http-port": free_port(), "grpc-port": free_port()}
        self.url = f"http://{host.address}:{ports['http-port']}"
        super().__init__("router", name, host, {**options, "host": host.address, **ports}, log)

    async def is_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/ready", timeout=ANSWER_TIMEOUT_S)).status_code == 200
        except httpx.HTTPError:
            return False


class Worker(Component):
    """A prefill or decode worker, always at the same address."""

    def __init__(
        self, role: str, name: str, host: Host, log: Path, options: Mapping[str, object], trust: Trust
    ) -> None:
        port = free_port()
        self.address = f"{host.address}:{port}"
        self._trust = trust
        super().__init__(role, name, host, {**options, "host": host.address, "port": port}, log)

    async def status(self) -> worker_pb2.WorkerStatus:
        """What it says of itself. Raises `NoAnswer`."""
        async with open_channel(self.address, self._trust) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                status: worker_pb2.WorkerStatus = await stub.GetStatus(
                    worker_pb2.StatusRequest(), timeout=ANSWER_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                raise NoAnswer(f"{self}: {error.details()}") from None
            return status


class Cluster:
    """All components. `close` leaves nothing."""

    def __init__(self, folder: Path, model: Path, transports: str, device: str, sizes: Sizes) -> None:
        self._folder = folder
        self.tokens = folder / "tokens"
        self.tokens.write_text(secrets.token_hex(32))
        self.trust = TrustConfig(auth_token_file=self.tokens).trust()
        self.network = Network() if Network.is_possible() else None
        self._numbers = {kind: itertools.count(1) for kind in ("bootstrap", "router", *ROLES)}
        self.bootstraps: list[Bootstrap] = []
        self.workers: list[Worker] = []
        self.routers: list[Router] = []
        try:
            self._start(sizes, {"auth-token-file": self.tokens, "log-format": "json"}, model, transports, device)
        except BaseException:
            self.close()
            raise

    def _start(self, sizes: Sizes, trusted: Mapping[str, object], model: Path, transports: str, device: str) -> None:
        for _ in range(sizes.bootstrap):
            self.bootstraps.append(Bootstrap(*self._place("bootstrap"), trusted, self.trust))
        addresses = ",".join(each.address for each in self.bootstraps)
        options = {**trusted, "model": model, "load-format": "dummy", "bootstrap": addresses}
        self._worker_options = {**options, **WORKER_OPTIONS, "transports": transports, "device": device}
        for role, count in (("prefill", sizes.prefill), ("decode", sizes.decode)):
            for _ in range(count):
                self.add_worker(role)
        for _ in range(sizes.router):
            self.routers.append(Router(*self._place("router"), options))

    def _place(self, kind: str) -> tuple[str, Host, Path]:
        """Name, host and log of a new component."""
        name = f"{kind}{next(self._numbers[kind])}"
        return name, self.new_host(), self._folder / f"{name}.log"

    def new_host(self) -> Host:
        return self.network.add_host() if self.network else HERE

    def add_worker(self, role: str) -> Worker:
        worker = Worker(role, *self._place(role), self._worker_options, self.trust)
        self.workers.append(worker)
        return worker

    async def remove(self, worker: Worker, timeout_s: float) -> float:
        """Have a worker leave for good; return after how many seconds it was gone."""
        self.workers.remove(worker)
        return await worker.leave(timeout_s)

    @property
    def components(self) -> list[Component]:
        return [*self.bootstraps, *self.workers, *self.routers]

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.kind == role]

    def restart_dead(self) -> None:
        for component in self.components:
            if not component.is_running:
                component.start()

    # what it says of itself

    async def members(self) -> list[bootstrap_pb2.Instance]:
        """The workers that the first replica that answers lists."""
        for replica in self.bootstraps:
            try:
                return await replica.members()
            except NoAnswer:
                continue
        raise NoAnswer("no bootstrap replica answers")

    async def well(self) -> set[str]:
        """The addresses of workers that are ready and linked to every peer."""
        return {each.address for each in _well(await self.members())}

    async def ailing(self) -> str:
        """What is not as it should be, in words."""
        try:
            serving = [(await worker.status()).instance.instance_id for worker in self.workers]
            lists = [await replica.members() for replica in self.bootstraps]
        except NoAnswer as error:
            return str(error)
        for listed in lists:
            if sorted(each.instance_id for each in _well(listed)) != sorted(serving) or len(listed) != len(serving):
                return f"not all are linked to all: {[(each.address, each.state) for each in listed]}"
        async with httpx.AsyncClient() as client:
            unready = [str(router) for router in self.routers if not await router.is_ready(client)]
        return f"not ready: {unready}" if unready else ""

    async def wait_until_well(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Return after how many seconds nothing ailed. Raises `TimeoutError`."""
        return await until(self.ailing, timeout_s)

    async def statuses(self) -> list[worker_pb2.WorkerStatus]:
        """What each worker says of itself. Raises `NoAnswer`."""
        return [await worker.status() for worker in self.workers]

    def close(self) -> None:
        for component in self.components:
            component.kill()


async def until(complaint: Callable[[], Awaitable[str]], timeout_s: float) -> float:
    """Return after how many seconds there was no complaint. Raises `TimeoutError` with the last one."""
    began_s = time.monotonic()
    while words := await complaint():
        if time.monotonic() > began_s + timeout_s:
            raise TimeoutError(f"after {timeout_s:g} s: {words}")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began_s


def _well(members: Sequence[bootstrap_pb2.Instance]) -> list[bootstrap_pb2.Instance]:
    """Those that are ready and linked to every peer."""
    ready = [each for each in members if each.state == bootstrap_pb2.INSTANCE_STATE_READY and not each.paused]
    return [each for each in ready if set(each.load.linked_instances) >= _peers(each, ready) != set()]


def _peers(of: bootstrap_pb2.Instance, ready: Sequence[bootstrap_pb2.Instance]) -> set[int]:
    return {each.instance_id for each in ready if each.role in PEERS[of.role]} - {of.instance_id}
