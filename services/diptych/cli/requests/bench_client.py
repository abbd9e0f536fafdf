"""Writes for `diptych bench kv`: over every path with every piece size, compared with a memory copy of the same."""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np

from diptych.cli.requests.bench_pool import PAGE_NBYTES, Scatter, open_bench, scatter
from diptych.common.errors import ConfigError
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.transport import Flow, LinkDown, LinkUp, NoteReceived, OpDone, PageWrite, TransportEvent
from diptych.kvtransfer.ucx import UcxTransport
from diptych.v1 import bench_pb2
from diptych.v1.bench_pb2_grpc import KvBenchStub

OP_NBYTES: Final = 16 << 20  # one write has so many, as a chunk of a long prompt may
NUM_PINGS: Final = 200
NOTE: Final = b"x" * 64
TIMEOUT_S: Final = 60.0  # limit for the wait for any event


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

    def as_json(self) -> dict[str, Any]:
        rows = [{name: getattr(row, name) for name in Row.__slots__} for row in self.rows]
        return {"lanes": self.lanes, "library": self.library, "rtt_us": self.rtt_us, "rows": rows}


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
            link = _Link(transport, pool, KvBenchStub(channel), address)
            return link.measure([size << 10 for size in piece_kib], rounds)
    finally:
        transport.close()


class _Link:
    """To the process that is written to."""

    def __init__(self, transport: UcxTransport, pool: HostPool, stub: KvBenchStub, address: str) -> None:
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
