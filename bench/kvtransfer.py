"""Scattered KV page writes between two processes, over shared memory and over TCP, against what the machine can do.

The limits are measured in the same run, in turns with the cases: memcpy of the same pieces into another shared mapping,
and a raw TCP stream of as many bytes between two processes. Also: the target's CPU while it is written to. Digests,
short transfers beside long ones and small notes are measured by `kv_flow.py`. Runs alone: `python bench/kvtransfer.py`;
`--nixl PYTHON` and `--mooncake PYTHON` name interpreters that have those libraries, to measure them in turns with ours.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import kvtransfer_rivals
import numpy as np
import numpy.typing as npt
from kvtransfer_rivals import Rival
from kvtransfer_target import Target
from report import Report, arguments

from diptych.cli.requests.kv_bench import Scatter, scatter
from diptych.common.native import build_library
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import LinkUp, OpDone, PageWrite, TransportEvent
from diptych.kvtransfer.ucx import UcxOptions, open_transport

PAGE_NBYTES: Final = 16 << 10
PIECE_KIB: Final = (16, 64, 256, 1024, 2048)
OP_NBYTES: Final = 16 << 20  # of one write_pages: what a chunk of a long prompt may be
CPU_WINDOW_S: Final = 1.0
CPU_BUDGET_PERCENT: Final = 10.0


class Initiator:
    """This process: writes into the target's pool."""

    def __init__(self, transports: str, pool_nbytes: int) -> None:
        layout = PoolLayout.kv(pool_nbytes // PAGE_NBYTES, 1, 16, 2, PAGE_NBYTES // 256, "float32")
        self.transport = open_transport(1, options=UcxOptions(transports=transports))  # type: ignore[arg-type]
        self.pool = self.transport.allocate_pool(layout)
        self.bytes = np.frombuffer(self.pool.buffer, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(0).integers(0, 256, layout.nbytes, dtype=np.uint8)
        self.target = Target(transports, layout, self.transport.metadata())
        self.transport.connect(2, self.target.metadata)
        self.wait(lambda event: event == LinkUp(2))

    def wait(self, wanted: Callable[[TransportEvent], bool]) -> None:
        """Sleep until an event is wanted; the ones before it are dropped."""
        poller = select.poll()
        poller.register(self.transport.fileno(), select.POLLIN)
        while not any([wanted(event) for event in self.transport.poll()]):
            if not poller.poll(10_000):
                raise TimeoutError("no event within 10 s")

    def write(self, pieces: Scatter, flow: Flow = NO_FLOW) -> float:
        """Write every piece; return the seconds until all of them were complete at the target."""
        pages = OP_NBYTES // PAGE_NBYTES
        began = time.perf_counter()
        for first in range(0, len(pieces.src), pages):
            part = slice(first, first + pages)
            op = self.transport.write_pages(2, PageWrite(pieces.src[part], pieces.dst[part]), flow=flow)
        self.wait(lambda event: isinstance(event, OpDone) and event.op == op)
        return time.perf_counter() - began

    def verify(self, pieces: Scatter) -> None:
        """Raise unless the target holds what was written."""
        page_nbytes = self.pool.layout.page_nbytes
        pages = self.bytes.reshape(-1, page_nbytes)
        pairs = zip(pieces.src.tolist(), pieces.dst.tolist(), strict=True)
        expected = add_digests(*(digest_bytes(pages[src], dst * page_nbytes) for src, dst in pairs))
        if self.target.digest(pieces.dst) != expected:
            raise RuntimeError("the target's pages differ from ours")

    def close(self) -> None:
        self.target.close()
        self.transport.close()


class Memcpy:
    """The limit of shared memory: the same pieces, copied by C into another shared mapping."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        library = ctypes.CDLL(str(build_library(Path(__file__).with_name("copy_pieces.c"))))
        self._copy = library.copy_pieces
        self._copy.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t] * 2
        self._source = source
        self._target = np.frombuffer(mmap.mmap(-1, source.nbytes), dtype=np.uint8)
        self._target[:: mmap.PAGESIZE] = 1  # page faults are not what is measured

    def copy(self, pieces: Scatter) -> float:
        run = pieces.piece_nbytes // PAGE_NBYTES
        src, dst = (np.ascontiguousarray(pages[::run] // run) for pages in (pieces.src, pieces.dst))
        arrays = [array.ctypes.data for array in (self._target, self._source, dst, src)]
        began = time.perf_counter()
        self._copy(*arrays, len(src), pieces.piece_nbytes)
        return time.perf_counter() - began


def measure_writes(
    report: Report,
    name: str,
    one: Initiator,
    rivals: list[Rival],
    rounds: int,
    limit: str,
    run: Callable[[Scatter], float],
) -> None:
    """One row a piece size; the case, its limit and rivals take turns, and the best of each counts."""
    for piece_kib in PIECE_KIB:
        pieces = scatter(one.bytes.nbytes // PAGE_NBYTES, PAGE_NBYTES, piece_kib << 10)
        size = pieces.piece_nbytes
        times = [(one.write(pieces), run(pieces), *(rival.write(size) for rival in rivals)) for _ in range(rounds)]
        one.verify(pieces)
        for rival in rivals:
            rival.verify(size)
        speed, limit_speed, *others = (one.bytes.nbytes / min(column) / 1e9 for column in zip(*times, strict=True))
        peers = {rival.name: other for rival, other in zip(rivals, others, strict=True)}
        case, ratio = f"{name}/{piece_kib}KiB", speed / limit_speed
        report.row("kvtransfer", case, speed, "GB/s", limit_speed, limit, ratio, peers)


def measure_cpu(report: Report, name: str, one: Initiator) -> None:
    """CPU of the target process while it is written to without pause."""
    pieces = scatter(one.bytes.nbytes // PAGE_NBYTES, PAGE_NBYTES, 64 << 10)
    began, cpu_s = time.perf_counter(), one.target.cpu_s()
    while time.perf_counter() - began < CPU_WINDOW_S:
        one.write(pieces)
    percent = 100 * (one.target.cpu_s() - cpu_s) / (time.perf_counter() - began)
    limits = (CPU_BUDGET_PERCENT, "budget", CPU_BUDGET_PERCENT / percent) if name == "shm" else (None, "", None)
    report.row("kvtransfer", f"{name}/target CPU", percent, "% of a core", *limits)


def measure(report: Report, name: str, pool_nbytes: int, rounds: int, options: argparse.Namespace) -> None:
    one = Initiator(name, pool_nbytes)
    rivals = kvtransfer_rivals.start(options, name, pool_nbytes)
    print(f"{name}: {one.transport.describe(2)}", file=sys.stderr)
    one.write(scatter(pool_nbytes // PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES))  # warm
    if name == "shm":
        measure_writes(report, name, one, rivals, rounds, "memcpy, same run", Memcpy(one.bytes).copy)
    else:
        stream = one.target.raw_stream
        limit = "raw TCP stream, same run"
        measure_writes(report, name, one, rivals, rounds, limit, lambda _: stream(one.bytes.nbytes))
    for rival in rivals:
        rival.close()
    measure_cpu(report, name, one)
    one.close()


def main() -> None:
    parser = arguments(__doc__)
    kvtransfer_rivals.add_options(parser)
    options = parser.parse_args()
    pool_nbytes, rounds = (128 << 20, 5) if options.quick else (512 << 20, 15)
    with Report(as_json=options.json) as report:
        for name in ("shm", "tcp"):
            measure(report, name, pool_nbytes, rounds, options)


if __name__ == "__main__":
    main()
