"""Two ends of a link, the same to a test whether they are objects or processes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ended_log import end_log

from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import RankTransfer, TpModelWorker
from diptych.engine.tensor_parallel.transfers.rank_id import rank_id
from diptych.engine.tensor_parallel.transfers.ranked_link import ranked_metadata
from diptych.engine.tensor_parallel.transfers.transport import TensorParallelTransport
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.inproc.network import InprocNetwork
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import (
    LinkDown,
    LinkUp,
    NoteReceived,
    OpDone,
    PageWrite,
    PeerTransport,
    Refusals,
    TransportEvent,
)

LAYOUT = PoolLayout.kv(num_pages=64, num_layers=4, page_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
DEVICE_TRANSPORTS: dict[str, str] = {  # by device and path
    "emulated-mover": "shm",
    "emulated-staged": "tcp",
    "cuda-mover": "auto",
    "cuda-put": "auto",
    "cuda-staged": "tcp",
}
IN_THIS_PROCESS = ("inproc", "ranked")  # kinds of `make_end`
FAST: dict[str, Any] = {"heartbeat_s": 0.1, "heartbeat_misses": 30, "connect_s": 5.0}  # patient with busy machines
HUNG_S = 60.0  # that nothing takes on however busy a machine

NIXL_VARIABLE = "DIPTYCH_NIXL_PATH"
NIXL_FOLDER = Path(os.environ.get(NIXL_VARIABLE, Path(__file__).parents[2] / ".nixl"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ends in processes of their own are for integration tests."""
    if hasattr(item, "callspec") and item.callspec.params.get("make_end", "inproc") not in IN_THIS_PROCESS:
        item.add_marker("integration")


class End:
    """What a test does with one end. `events` collects all that came so far."""

    instance_id: int
    events: list[TransportEvent]

    def wait(self, wanted: Callable[[TransportEvent], bool], timeout_s: float = HUNG_S) -> TransportEvent:
        """Return the first event that is wanted, out of all so far."""
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if wanted(event):
                    return event
            assert time.monotonic() < deadline, f"not within {timeout_s} s; events: {self.events}"
            self.pump(0.1)

    def wait_note(self, timeout_s: float = HUNG_S) -> NoteReceived:
        event = self.wait(lambda event: isinstance(event, NoteReceived), timeout_s)
        assert isinstance(event, NoteReceived)
        return event

    def wait_done(self, op: int, timeout_s: float = HUNG_S) -> OpDone:
        event = self.wait(lambda event: isinstance(event, OpDone) and event.op == op, timeout_s)
        assert isinstance(event, OpDone)
        return event

    def wait_link(self, up: bool, timeout_s: float = HUNG_S) -> TransportEvent:
        return self.wait(lambda event: isinstance(event, LinkUp if up else LinkDown), timeout_s)

    def wait_digest(self, pages: list[int]) -> int:
        """Return the digest of pages of this end, as they lie there."""
        done = self.wait_done(self.digest_pages(pages))
        assert done.digest is not None
        return done.digest

    def reference(
        self, seed: int, src: list[int], dst: list[int], layers: tuple[int, int] = (0, LAYOUT.num_layers)
    ) -> int:
        """Return the digest of pages `src` of an end that was filled with `seed`, as they lie at pages `dst`."""
        return reference_digest(contents(seed, LAYOUT), src, dst, layers)

    def digest_pages(self, pages: list[int]) -> int:
        raise NotImplementedError

    def pump(self, timeout_s: float) -> None:
        raise NotImplementedError

    def let_time_pass(self, seconds: float) -> None:
        """It passes by itself where there is a clock."""


def contents(seed: int, layout: PoolLayout) -> npt.NDArray[np.uint8]:
    """Return what `fill` writes: `[num_pages, page_nbytes]`."""
    return np.random.default_rng(seed).integers(0, 256, (layout.num_pages, layout.page_nbytes), dtype=np.uint8)


def reference_digest(pages: npt.NDArray[np.uint8], src: list[int], dst: list[int], layers: tuple[int, int]) -> int:
    begin, end = (layer * LAYOUT.layer_nbytes for layer in layers)
    pairs = zip(src, dst, strict=True)
    return add_digests(*(digest_bytes(pages[one, begin:end], other * pages.shape[1] + begin) for one, other in pairs))


def page_hash(memory: memoryview, page_nbytes: int, pages: list[int]) -> str:
    """Return a hash of the bytes of pages, in order."""
    return hashlib.sha1(b"".join(memory[page * page_nbytes : (page + 1) * page_nbytes] for page in pages)).hexdigest()


class InprocEnd(End):
    def __init__(
        self, network: InprocNetwork, instance_id: int, layout: PoolLayout = LAYOUT, only_granted: bool = False
    ) -> None:
        self.instance_id = instance_id
        self.network = network
        self.memory = network.transport(instance_id, only_granted=only_granted)
        self.transport: PeerTransport = self.memory
        self.pool = self.memory.allocate_pool(layout)
        self.events = []

    def metadata(self) -> bytes:
        return self.memory.metadata()

    def connect(self, peer: int, metadata: bytes) -> None:
        self.transport.connect(peer, metadata)

    def disconnect(self, peer: int) -> None:
        self.transport.disconnect(peer)

    def fill(self, seed: int) -> None:
        pages = np.frombuffer(self.pool.buffer, dtype=np.uint8).reshape(self.pool.layout.num_pages, -1)
        pages[:] = contents(seed, self.pool.layout)

    def digest(self, pages: list[int]) -> str:
        return page_hash(self.pool.buffer, self.pool.layout.page_nbytes, pages)

    def flip(self, page: int, layer: int) -> None:
        self.pool.buffer[page * self.pool.layout.page_nbytes + layer * self.pool.layout.layer_nbytes] ^= 1

    def write(
        self,
        peer: int,
        src: list[int],
        dst: list[int],
        note: bytes = b"",
        layers: tuple[int, int] | None = None,
        skip_tokens: int = 0,
        as_bytes: bool = False,
        **flow: Any,
    ) -> int:
        write = PageWrite(np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32), layers, skip_tokens, as_bytes)
        return self.transport.write_pages(peer, write, note, Flow(**flow))

    def note(self, peer: int, note: bytes, **options: Any) -> int:
        return self.transport.send_note(peer, note, **options)

    def digest_pages(self, pages: list[int]) -> int:
        return self.transport.digest_pages(np.array(pages))

    def read(self, pages: list[int]) -> bytes:
        return np.frombuffer(self.pool.buffer, np.uint8).reshape(self.pool.layout.num_pages, -1)[pages].tobytes()

    def unpack_pages(self, peer: int, pages: list[int]) -> int:
        return self.transport.unpack_pages(peer, np.array(pages))

    def lands_in_parts(self, peer: int) -> bool:
        return self.transport.lands_in_parts(peer)

    def paths(self, peer: int) -> list[str]:
        return list(self.transport.paths(peer))

    def use_path(self, peer: int, path: str) -> None:
        self.transport.use_path(peer, path)

    def describe(self, peer: int) -> dict[str, Any]:
        return dataclasses.asdict(self.transport.describe(peer))

    def probe_pages(self) -> list[int]:
        return list(self.pool.probe_pages.tolist())

    def lanes(self, peer: int) -> str:
        return self.transport.describe(peer).lanes

    def writer_gone(self, peer: int) -> bool:
        return self.transport.writer_gone(peer)

    def grant(self, peer: int, pages: list[int]) -> None:
        self.transport.grant_pages(peer, np.array(pages))

    def revoke(self, pages: list[int]) -> None:
        self.memory.revoke_pages(np.array(pages))

    def refusals(self) -> Refusals:
        return self.memory.refusals()

    def let_time_pass(self, seconds: float) -> None:
        self.network.now_s += seconds

    def pump(self, timeout_s: float) -> None:
        self.network.deliver_all()
        self.events += self.transport.poll()

    def is_readable(self, timeout_s: float) -> bool:
        return bool(wait([self.transport.fileno()], timeout_s))

    def kill(self) -> None:
        self.network.kill(self.instance_id)

    def close(self) -> None:
        self.transport.close()


class RankedEnd(InprocEnd):
    """Two tensor-parallel ranks, each with a transport in a network of its own. Rank 1 does its part in `step`."""

    def __init__(
        self,
        networks: tuple[InprocNetwork, InprocNetwork],
        others: list[RankedEnd],
        instance_id: int,
        endpoint: str,
        layout: PoolLayout,
    ) -> None:
        self.instance_id = instance_id
        self.others = others
        self.writing: set[int] = set()
        self.networks = networks
        log = RankLog(HostChannels(endpoint), 2)
        ids = [rank_id(instance_id, rank) for rank in range(2)]
        first, second = (network.transport(name) for network, name in zip(networks, ids, strict=True))
        both = dataclasses.replace(layout.sole_region, total_heads=2 * layout.sole_region.num_heads)
        parts = [dataclasses.replace(layout, regions=(both,), rank=rank, num_ranks=2) for rank in range(2)]
        self.memory = first
        self.transport = TensorParallelTransport(first, parts[0], log)
        self.pool = first.allocate_pool(parts[0])
        self.part = second.allocate_pool(parts[1])
        self.rank = TpModelWorker(HostChannels(endpoint), 1)
        self.transfer = RankTransfer(second, self.part)
        self.known_metadata = ranked_metadata([first.metadata(), second.metadata()])
        self.log = log
        self.events = []

    def metadata(self) -> bytes:
        return self.known_metadata

    def fill(self, seed: int) -> None:
        super().fill(seed)
        pages = np.frombuffer(self.part.buffer, dtype=np.uint8).reshape(self.part.layout.num_pages, -1)
        pages[:] = contents(seed + 1, self.part.layout)

    def digest(self, pages: list[int]) -> str:
        return super().digest(pages) + page_hash(self.part.buffer, self.part.layout.page_nbytes, pages)

    def reference(
        self, seed: int, src: list[int], dst: list[int], layers: tuple[int, int] = (0, LAYOUT.num_layers)
    ) -> int:
        return add_digests(*(super(RankedEnd, self).reference(seed + rank, src, dst, layers) for rank in range(2)))

    def let_time_pass(self, seconds: float) -> None:
        for network in self.networks:
            network.now_s += seconds

    def writer_gone(self, peer: int) -> bool:
        return bool(self.asked(lambda: self.transport.writer_gone(peer)))

    def write(self, *arguments: Any, **options: Any) -> int:
        op = super().write(*arguments, **options)
        self.writing.add(op)
        return op

    def asked(self, ask: Callable[[], Any]) -> Any:
        """Return what `ask` does, while rank 1 answers."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask)
            while not answer.done():
                self.step()
            return answer.result()

    def step(self) -> None:
        self.reads_the_end()
        self.rank.report(self.transfer)

    def reads_the_end(self) -> bool:
        return self.rank.apply_due(None, self.transfer, None)  # type: ignore[arg-type]

    def step_all(self) -> None:
        for network in self.networks:
            network.deliver_all()
        for end in self.others:
            end.step()

    def pump(self, timeout_s: float) -> None:
        self.step_all()
        for end in self.others:
            if end is self or end.writing:  # a sender's rank 0 sends the note when it has seen that the pages are there
                end.events += end.transport.poll()
                end.writing -= {event.op for event in end.events if isinstance(event, OpDone)}

    def is_readable(self, timeout_s: float) -> bool:
        self.step_all()
        return super().is_readable(timeout_s)

    def kill(self) -> None:
        for rank, network in enumerate(self.networks):
            network.kill(rank_id(self.instance_id, rank))

    def close(self) -> None:
        super().close()
        end_log(self.log, self.reads_the_end)
        self.rank.close()


class ChildError(Exception):
    """What the child's transport raised, by its name."""


class Child:
    """A process that runs `peer.py`, under `prefix` if there is one."""

    def __init__(self, *prefix: str, backend: str = "ucx") -> None:
        command = [*prefix, sys.executable, str(Path(__file__).with_name("peer.py"))]
        environment = {**os.environ, NIXL_VARIABLE: str(NIXL_FOLDER)} if backend == "nixl" else None
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.backend = backend

    def ask(self, do: str, **fields: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the child ended with code {self.process.wait(HUNG_S)}"
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{reply['error']}: {reply['message']}")
        return reply["answer"]

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(60)


class ChildEnd(End):
    """A UCX transport in a process of its own: one UCX a process.

    `kind` is what UCX may use, or a device and the path from it: "emulated-staged".
    """

    def __init__(self, child: Child, kind: str, instance_id: int, layout: PoolLayout = LAYOUT, **options: Any) -> None:
        self.instance_id = instance_id
        self.events = []
        self.child = child
        self.process, self.ask = child.process, child.ask
        device, self.path = kind.split("-") if kind in DEVICE_TRANSPORTS else ("", "")
        transports = DEVICE_TRANSPORTS.get(kind, kind)
        options = {"transports": transports, **FAST, **options}
        self._open(instance_id, layout, options, device)

    def _open(self, instance_id: int, layout: PoolLayout, options: dict[str, Any], device: str) -> None:
        self.ask("open", instance_id=instance_id, layout=dataclasses.asdict(layout), device=device, options=options)

    def metadata(self) -> bytes:
        return base64.b64decode(self.ask("metadata"))

    def connect(self, peer: int, metadata: bytes) -> None:
        self.ask("connect", peer=peer, metadata=base64.b64encode(metadata).decode())

    def disconnect(self, peer: int) -> None:
        self.ask("disconnect", peer=peer)

    def fill(self, seed: int) -> None:
        self.ask("fill", seed=seed)

    def digest(self, pages: list[int]) -> str:
        return str(self.ask("digest", pages=pages))

    def flip(self, page: int, layer: int) -> None:
        self.ask("flip", page=page, layer=layer)

    def write(
        self,
        peer: int,
        src: list[int],
        dst: list[int],
        note: bytes = b"",
        layers: tuple[int, int] | None = None,
        skip_tokens: int = 0,
        as_bytes: bool = False,
        **flow: Any,
    ) -> int:
        fields = {"src": src, "dst": dst, "layers": layers, "skip_tokens": skip_tokens, "as_bytes": as_bytes}
        return int(self.ask("write", peer=peer, note=base64.b64encode(note).decode(), flow=flow, **fields))

    def note(self, peer: int, note: bytes, **options: Any) -> int:
        return int(self.ask("note", peer=peer, note=base64.b64encode(note).decode(), options=options))

    def digest_pages(self, pages: list[int]) -> int:
        return int(self.ask("digest_pages", pages=pages))

    def read(self, pages: list[int]) -> bytes:
        return base64.b64decode(self.ask("read", pages=pages))

    def unpack_pages(self, peer: int, pages: list[int]) -> int:
        return int(self.ask("unpack_pages", peer=peer, pages=pages))

    def lands_in_parts(self, peer: int) -> bool:
        return bool(self.ask("lands_in_parts", peer=peer))

    def paths(self, peer: int) -> list[str]:
        return list(self.ask("paths", peer=peer))

    def use_path(self, peer: int, path: str) -> None:
        self.ask("use_path", peer=peer, path=path)

    def describe(self, peer: int) -> dict[str, Any]:
        return dict(self.ask("describe", peer=peer))

    def probe_pages(self) -> list[int]:
        return list(self.ask("probe_pages"))

    def lanes(self, peer: int) -> str:
        return str(self.ask("lanes", peer=peer))

    def writer_gone(self, peer: int) -> bool:
        return bool(self.ask("writer_gone", peer=peer))

    def grant(self, peer: int, pages: list[int]) -> None:
        self.ask("grant", peer=peer, pages=pages)

    def revoke(self, pages: list[int]) -> None:
        self.ask("revoke", pages=pages)

    def refusals(self) -> Refusals:
        return Refusals(**self.ask("refusals"))

    def pump(self, timeout_s: float) -> None:
        for event in self.ask("events", timeout_s=timeout_s):
            kind = {"LinkUp": LinkUp, "LinkDown": LinkDown, "NoteReceived": NoteReceived, "OpDone": OpDone}[
                event.pop("kind")
            ]
            if "data" in event:
                event["data"] = base64.b64decode(event["data"])
            self.events.append(kind(**event))
            if self.path and kind is LinkUp:
                self.use_path(event["peer"], self.path)

    def is_readable(self, timeout_s: float) -> bool:
        return bool(self.ask("is_readable", timeout_s=timeout_s))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """End without closing anything."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": "leave"}) + "\n")
        self.process.stdin.flush()
        self.process.wait(60)

    def close(self) -> None:
        if self.child.is_running:
            self.ask("close")


class NixlEnd(ChildEnd):
    """A NIXL transport: its process has another UCX."""

    def _open(self, instance_id: int, layout: PoolLayout, options: dict[str, Any], device: str) -> None:
        self.ask("open_nixl", instance_id=instance_id, layout=dataclasses.asdict(layout), options=options)


Make = Callable[..., Any]


@pytest.fixture(scope="session")
def children() -> Iterator[list[Child]]:
    """Processes that wait for work."""
    idle: list[Child] = []
    yield idle
    for child in idle:
        child.end()


@pytest.fixture
def make_child_end(children: list[Child]) -> Iterator[Make]:
    """Makes ends in processes; those that are left run the next test's."""
    made: list[ChildEnd] = []

    def make(kind: str, instance_id: int, layout: PoolLayout = LAYOUT, **options: Any) -> ChildEnd:
        backend, end = ("nixl", NixlEnd) if kind.startswith("nixl-") else ("ucx", ChildEnd)
        child = next((child for child in children if child.backend == backend), None)
        if child is None:
            child = Child(backend=backend)
        else:
            children.remove(child)
        made.append(end(child, kind.removeprefix("nixl-"), instance_id, layout, **options))
        return made[-1]

    yield make
    for end in made:
        end.close()
        children.append(end.child) if end.child.is_running else end.child.end()


class HostEnd(ChildEnd):
    """An end on a host of its own: a network namespace that lives as long as the process, with one cable."""

    def __init__(self, instance_id: int, number: int, centre: HostEnd | None, **options: Any) -> None:
        self.number = number
        self.centre = centre or self  # where the cables meet
        child = Child("unshare", "--net")
        child.ask("cpu_s")  # it runs, so it has its namespace
        self.process = child.process
        self._plug_in()
        super().__init__(child, "tcp", instance_id, **options)

    def _plug_in(self) -> None:
        if self.centre is self:
            self.ip("link", "add", "eth0", "type", "bridge")
        else:
            port, end = f"port{self.number}", ("peer", "name", "eth0", "netns", str(self.process.pid))
            self.centre.ip("link", "add", port, "type", "veth", *end)
            self.centre.ip("link", "set", port, "master", "eth0", "up")
        self.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self.ip("link", "set", device, "up")

    @property
    def address(self) -> str:
        return f"10.78.0.{self.number}"

    def ip(self, *arguments: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.process.pid), "-n", "ip", *arguments], check=True)

    def pull_cable(self) -> None:
        """At the centre's end: neither process is told."""
        self.centre.ip("link", "set", f"port{self.number}", "down")

    def lose_words_to(self, other: HostEnd) -> None:
        """What this host sends to the other is lost; what it receives is not."""
        self.ip("route", "add", "blackhole", other.address)

    def vanish(self) -> None:
        """As a host that loses its power: no farewell of any kind leaves it."""
        self.ip("link", "set", "eth0", "down")
        self.kill()


def may_cut_networks() -> bool:
    if not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return False
    probe = "ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2"
    return subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True).returncode == 0


@pytest.fixture
def make_host_end() -> Iterator[Make]:
    """Makes ends on hosts of their own, joined by the first one."""
    if not may_cut_networks():
        pytest.skip("cutting networks takes root, and unshare, nsenter and ip; a container may forbid it to root, too")
    made: list[HostEnd] = []

    def make(instance_id: int, **options: Any) -> HostEnd:
        made.append(HostEnd(instance_id, len(made) + 1, made[0] if made else None, **options))
        return made[-1]

    yield make
    for end in reversed(made):
        end.close()
        end.child.end()


@pytest.fixture
def make_ranked_end(tmp_path: Path) -> Iterator[Make]:
    """Makes ends of two ranks."""
    networks = InprocNetwork(), InprocNetwork()
    made: list[RankedEnd] = []

    def make(instance_id: int, layout: PoolLayout = LAYOUT) -> RankedEnd:
        made.append(RankedEnd(networks, made, instance_id, f"ipc://{tmp_path}/{len(made)}", layout))
        return made[-1]

    yield make
    for end in made:
        end.close()


def device_kinds() -> list[Any]:
    """Parameters of the device's ends; those that need one are skipped where there is none. Two ends may share it."""
    missing = importlib.util.find_spec("triton") is None or not torch.cuda.is_available()
    gpu = [pytest.mark.gpu, pytest.mark.skipif(missing, reason="needs a CUDA device and Triton")]
    return [pytest.param(kind, marks=gpu if kind.startswith("cuda") else []) for kind in DEVICE_TRANSPORTS]


HAS_NIXL = (NIXL_FOLDER / "nixl_cu13").is_dir() or importlib.util.find_spec("nixl_cu13") is not None


@pytest.fixture
def has_nixl() -> None:
    if not HAS_NIXL:
        pytest.skip("no NIXL: `make nixl`")


def nixl(transports: str) -> Any:
    """A parameter for NIXL's transport, skipped where there is none."""
    return pytest.param(f"nixl-{transports}", marks=pytest.mark.skipif(not HAS_NIXL, reason="no NIXL: `make nixl`"))


@pytest.fixture(params=["inproc", "ranked", "shm", "tcp", *device_kinds(), nixl("shm")])
def make_end(request: pytest.FixtureRequest, make_ranked_end: Make) -> Iterator[Make]:
    """Makes ends of one kind of transport. NIXL over TCP is tried where processes matter (`make_process_end`)."""
    make_child_end = None if request.param in IN_THIS_PROCESS else request.getfixturevalue("make_child_end")
    network = InprocNetwork()
    made: list[InprocEnd] = []

    def make(instance_id: int, layout: PoolLayout = LAYOUT, **options: Any) -> Any:
        if request.param == "ranked":
            return make_ranked_end(instance_id, layout)
        if make_child_end:
            return make_child_end(request.param, instance_id, layout, **options)
        made.append(InprocEnd(network, instance_id, layout, options.get("only_granted", False)))  # it has no clock
        return made[-1]

    yield make
    for end in made:
        end.close()


@pytest.fixture
def make_inproc_end() -> Iterator[Make]:
    """Makes ends in a network of the test's own."""
    made: list[InprocEnd] = []

    def make(network: InprocNetwork, instance_id: int, layout: PoolLayout = LAYOUT) -> InprocEnd:
        made.append(InprocEnd(network, instance_id, layout))
        return made[-1]

    yield make
    for end in made:
        end.close()


@pytest.fixture(params=["shm", "tcp", nixl("tcp")])
def make_process_end(request: pytest.FixtureRequest, make_child_end: Make) -> Make:
    """The same, of processes only."""
    return lambda instance_id, **options: make_child_end(request.param, instance_id, **options)


@pytest.fixture(params=device_kinds())
def make_device_end(request: pytest.FixtureRequest, make_child_end: Make) -> Make:
    """The same, of pools in device memory, by every path from it."""
    return lambda instance_id, layout, **options: make_child_end(request.param, instance_id, layout, **options)


@pytest.fixture(params=["shm", "tcp"])
def make_ucx_end(request: pytest.FixtureRequest, make_child_end: Make) -> Make:
    """The same, of UCX only."""
    return lambda instance_id, **options: make_child_end(request.param, instance_id, **options)


@pytest.fixture
def link() -> Callable[[Any, Any], None]:
    """Connects two ends and waits until both say so."""

    def connect(left: Any, right: Any) -> None:
        left.connect(right.instance_id, right.metadata())
        right.connect(left.instance_id, left.metadata())
        left.wait(lambda event: event == LinkUp(right.instance_id))
        right.wait(lambda event: event == LinkUp(left.instance_id))

    return connect
