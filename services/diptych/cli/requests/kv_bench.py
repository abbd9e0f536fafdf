"""Both ends of `diptych bench kv`.

`measure` writes over every path with every piece size, and compares that with a memory copy of the same. `serve` is
written to: it links to every peer that asks, echoes notes and digests pages. A piece is several small pages.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import select
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from diptych.common import event_loop
from diptych.common.errors import ConfigError
from diptych.common.net.reachable import bracketed
from diptych.common.net.rpc import listen, new_server, open_sync_channel
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import Trust
from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, PageWrite, Transport, TransportEvent
from diptych.kvtransfer.ucx import UcxOptions, UcxTransport, open_transport
from diptych.v1 import bench_pb2, bench_pb2_grpc

OP_NBYTES: Final = 16 << 20  # one write has so many, as a chunk of a long prompt may
NUM_PINGS: Final = 200
NOTE: Final = b"x" * 64
TIMEOUT_S: Final = 60.0  # limit for the wait for any event
PAGE_NBYTES: Final = 16 << 10

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scatter:
    """Pieces in random order on both sides; every page of a pool is in one."""

    piece_nbytes: int
    src: Pages  # a piece is a run of neighbours
    dst: Pages


def open_bench(pool_mib: int, transports: Transports) -> tuple[UcxTransport, HostPool]:
    transport = open_transport(secrets.randbits(64) or 1, options=UcxOptions(transports=transports))
    layout = PoolLayout.kv(
        num_pages=(pool_mib << 20) // PAGE_NBYTES,
        num_layers=1,
        page_size=16,
        num_kv_heads=2,
        head_dim=PAGE_NBYTES // 256,
        dtype="float32",
    )
    return transport, transport.allocate_pool(layout)


def scatter(num_pages: int, page_nbytes: int, piece_nbytes: int) -> Scatter:
    """Cut `num_pages` pages into pieces; what is left of them is in none. The same each time."""
    random = np.random.default_rng(piece_nbytes)
    run = np.arange(piece_nbytes // page_nbytes)
    num_pieces = num_pages // len(run)
    src, dst = ((random.permutation(num_pieces)[:, None] * len(run) + run).reshape(-1) for _ in range(2))
    return Scatter(piece_nbytes, src, dst)


@dataclass(frozen=True, slots=True)
class Row:
    """One path with one piece size."""

    path: str
    piece_kib: int
    gb_per_s: float
    memcpy_gb_per_s: float  # speed of copying the same pieces in this process
    is_intact: bool  # every byte arrived


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured."""

    lanes: str
    library: str
    rtt_us: float  # median of a small note, there and back
    rows: tuple[Row, ...]

    @property
    def is_intact(self) -> bool:
        return all(row.is_intact for row in self.rows)


def as_json(report: Report) -> str:
    """Return the report for programs."""
    return json.dumps(asdict(report), indent=2)


def as_text(report: Report) -> str:
    """Return the report as a table."""
    lines = [f"{report.lanes} ({report.library}); a note there and back: {report.rtt_us:.0f} us", ""]
    lines.append(f"{'path':<8} {'piece':>10} {'GB/s':>8} {'memcpy':>8} {'ratio':>6}")
    for row in report.rows:
        ratio = row.gb_per_s / row.memcpy_gb_per_s
        words = f"{row.path:<8} {row.piece_kib:>6} KiB {row.gb_per_s:>8.2f} {row.memcpy_gb_per_s:>8.2f} {ratio:>6.2f}"
        lines.append(words if row.is_intact else f"{words}  WRONG BYTES")
    return "\n".join(lines)


def measure(
    address: str, trust: Trust, pool_mib: int, piece_kib: Sequence[int], rounds: int, transports: Transports
) -> Report:
    """Measure against the process that serves at `address`. Raises `ConfigError` or `TransferError`."""
    transport, pool = open_bench(pool_mib, transports)
    try:
        with open_sync_channel(address, trust) as channel:
            link = _Link(transport, pool, bench_pb2_grpc.KvBenchStub(channel), address)
            return link.measure([size << 10 for size in piece_kib], rounds)
    finally:
        transport.close()


class _Link:
    """To the process that is written to."""

    def __init__(self, transport: UcxTransport, pool: HostPool, stub: bench_pb2_grpc.KvBenchStub, address: str) -> None:
        self._transport = transport
        self._stub = stub
        self._memory = np.frombuffer(pool.buffer, dtype=np.uint8)
        self._memory[:] = np.random.default_rng(0).integers(0, 256, len(self._memory), dtype=np.uint8)
        us = bench_pb2.BenchPeer(instance_id=transport.instance_id, engine_metadata=transport.metadata())
        try:
            them = stub.Join(us, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            advice = "`diptych bench kv --serve` starts the other end"
            raise ConfigError(f"nobody to measure with at {address}: {error.details()}; {advice}") from None
        self._peer = them.instance_id
        self._num_pages = min(pool.layout.num_pages, them.num_pages)
        transport.connect(self._peer, them.engine_metadata)
        self._wait(lambda event: isinstance(event, LinkUp))

    def measure(self, piece_nbytes: Sequence[int], rounds: int) -> Report:
        rows = []
        for path in self._transport.paths(self._peer):
            self._transport.use_path(self._peer, path)
            rows += [self._row(path, scatter(self._num_pages, PAGE_NBYTES, size), rounds) for size in piece_nbytes]
        rtt_us = statistics.median(self._ping() for _ in range(NUM_PINGS)) * 1e6
        info = self._transport.describe(self._peer)
        return Report(info.lanes, info.version, rtt_us, tuple(rows))

    def _row(self, path: str, pieces: Scatter, rounds: int) -> Row:
        is_intact = self._verify(pieces)  # and everything is warm after it
        nbytes = len(pieces.src) * PAGE_NBYTES
        times = [(self._timed_write(pieces), _timed_copy(self._memory, pieces)) for _ in range(rounds)]
        speed, limit = (nbytes / min(column) / 1e9 for column in zip(*times, strict=True))
        return Row(path, pieces.piece_nbytes >> 10, speed, limit, is_intact)

    def _verify(self, pieces: Scatter) -> bool:
        """Write every piece; return whether the peer has it."""
        self._memory[:8] = np.frombuffer(np.random.default_rng().bytes(8), dtype=np.uint8)
        written = [done.digest or 0 for done in self._write(pieces, Flow(with_digest=True))]
        found = self._stub.Digest(bench_pb2.BenchPages(pages=pieces.dst.tolist()), timeout=TIMEOUT_S)
        return bool(add_digests(*written) == found.digest)

    def _timed_write(self, pieces: Scatter) -> float:
        began = time.perf_counter()
        self._write(pieces, Flow())
        return time.perf_counter() - began

    def _write(self, pieces: Scatter, flow: Flow) -> list[OpDone]:
        """Write every piece and wait until all are there. Raises `TransferError`."""
        count = max(OP_NBYTES, pieces.piece_nbytes) // PAGE_NBYTES
        parts = [slice(first, first + count) for first in range(0, len(pieces.src), count)]
        writes = [PageWrite(pieces.src[part], pieces.dst[part]) for part in parts]
        open_ops = {self._transport.write_pages(self._peer, write, flow=flow) for write in writes}
        ends: list[OpDone] = []
        while open_ops:
            ends += [done for done in self._wait(lambda event: isinstance(event, OpDone)) if done.op in open_ops]
            open_ops -= {done.op for done in ends}
        return ends

    def _ping(self) -> float:
        began = time.perf_counter()
        self._transport.send_note(self._peer, NOTE)
        self._wait(lambda event: isinstance(event, NoteReceived))
        return time.perf_counter() - began

    def _wait(self, wanted: Callable[[TransportEvent], bool]) -> list[Any]:
        """Return the wanted events as soon as there are some. Raises `TransferError` when the link breaks."""
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        while poller.poll(TIMEOUT_S * 1000):
            events = self._transport.poll()
            for event in events:
                if isinstance(event, LinkDown):
                    raise TransferError(f"the link broke: {event.reason}")
                if isinstance(event, OpDone) and event.error is not None:
                    raise TransferError(f"a write failed: {event.error}")
            if found := [event for event in events if wanted(event)]:
                return found
        raise TransferError(f"nothing happened for {TIMEOUT_S:g} s")


def _timed_copy(memory: np.ndarray[Any, np.dtype[np.uint8]], pieces: Scatter) -> float:
    """Return the seconds to gather the same pieces into other memory."""
    rows = memory[: len(memory) // pieces.piece_nbytes * pieces.piece_nbytes].reshape(-1, pieces.piece_nbytes)
    order = pieces.src[:: pieces.piece_nbytes // PAGE_NBYTES] // (pieces.piece_nbytes // PAGE_NBYTES)
    target = np.ones((len(order), pieces.piece_nbytes), dtype=np.uint8)  # touched: no page faults
    began = time.perf_counter()
    np.take(rows, order, axis=0, out=target, mode="clip")
    return time.perf_counter() - began


class BenchService(bench_pb2_grpc.KvBenchServicer):
    """Implements `diptych.v1.KvBench`. `read` must be called whenever the transport has events."""

    def __init__(self, transport: Transport, pool: HostPool) -> None:
        self._transport = transport
        self._pool = pool
        self._digests: dict[int, asyncio.Future[OpDone]] = {}

    async def Join(self, request: bench_pb2.BenchPeer, context: Any) -> bench_pb2.BenchPeer:
        try:
            self._transport.connect(request.instance_id, request.engine_metadata)
        except TransferError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return bench_pb2.BenchPeer(
            instance_id=self._transport.instance_id,
            engine_metadata=self._transport.metadata(),
            num_pages=self._pool.layout.num_pages,
        )

    async def Digest(self, request: bench_pb2.BenchPages, context: Any) -> bench_pb2.BenchDigest:
        try:
            operation = self._transport.digest_pages(np.array(request.pages, dtype=np.int64))
        except TransferError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._digests[operation] = asyncio.get_running_loop().create_future()
        done = await self._digests[operation]
        return bench_pb2.BenchDigest(digest=done.digest or 0)

    def read(self) -> None:
        for event in self._transport.poll():
            match event:
                case LinkUp(peer):
                    print(f"linked to {peer:016x}: {self._transport.describe(peer)}", flush=True)
                case LinkDown(peer, reason):
                    print(f"link to {peer:016x} is down: {reason}", flush=True)
                case NoteReceived(peer, data):
                    self._transport.send_note(peer, data)
                case OpDone(operation) if operation in self._digests:
                    self._digests.pop(operation).set_result(event)


def serve_until_signal(host: str, port: int, trust: Trust, pool_mib: int, transports: Transports) -> None:
    """Be written to until SIGTERM or SIGINT."""
    asyncio.run(event_loop.run_until_signal(lambda stop: serve(host, port, trust, pool_mib, transports, stop)))


async def serve(host: str, port: int, trust: Trust, pool_mib: int, transports: Transports, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    transport, pool = open_bench(pool_mib, transports)
    service = BenchService(transport, pool)
    server = new_server(trust, Refusals())
    bench_pb2_grpc.add_KvBenchServicer_to_server(service, server)
    bound = listen(server, host, port, trust)
    asyncio.get_running_loop().add_reader(transport.fileno(), service.read)
    try:
        await server.start()
        print(f"ready: diptych bench kv --peer {bracketed(host)}:{bound}", flush=True)
        await stop.wait()
    finally:
        asyncio.get_running_loop().remove_reader(transport.fileno())
        await server.stop(grace=0)
        transport.close()
