"""What tensor parallelism adds to a step: an entry of the log, and all-reduces between two CPU processes.

An entry is compared with a copy of its bytes; an all-reduce with the same bytes sent and received by both ends of a
socket pair at once, which is the least that two ranks must exchange.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from report import Report, arguments

from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.meeting import FileMeeting
from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.v1 import rank_pb2

BENCH: Final = "tensor_parallel"
HIDDEN: Final = 4096
MAX_PAGES: Final = 64


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _reduce(1, Path(options.rank_of), options.quick)
        return
    with Report(as_json=options.json) as report:
        for batch_size in (16, 64, 256):
            _log(report, batch_size)
        for num_tokens, seconds in _both_ranks(options.quick):
            nbytes = num_tokens * HIDDEN * 4
            limit = _exchange_s(nbytes) * 1e6
            value = seconds * 1e6
            report.row(BENCH, f"all-reduce/{num_tokens}x{HIDDEN}", value, "us", limit, "socket pair", limit / value)


def _log(report: Report, batch_size: int) -> None:
    batch = _decode(batch_size)
    data = rank_pb2.RankEntry(step=step_to_wire(batch)).SerializeToString()
    limit = _median_s(lambda: bytearray(data)) * 1e6
    for name, work in (
        ("write", lambda: rank_pb2.RankEntry(step=step_to_wire(batch)).SerializeToString()),
        ("read", lambda: step_from_wire(rank_pb2.RankEntry.FromString(data).step)),
    ):
        value = _median_s(work) * 1e6
        report.row(BENCH, f"log entry/batch {batch_size}/{name}", value, "us", limit, "copy", limit / value)


def _decode(batch_size: int) -> ForwardBatch:
    rows = np.arange(batch_size)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=rows,
        positions=rows,
        out_slots=rows,
        page_table=np.zeros((batch_size, MAX_PAGES), np.int32),
        seq_lens=rows + 1,
        extend_lens=np.ones(batch_size, np.int64),
        num_sampled=np.ones(batch_size, np.int64),
    )


def _both_ranks(quick: bool) -> list[tuple[int, float]]:
    """Return the time of an all-reduce by the number of tokens; the other rank is a process."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, __file__, "--rank-of", str(store), *(["--quick"] if quick else [])]
        with subprocess.Popen(command) as other:
            times = _reduce(0, store, quick)
            other.wait()
    return times


def _reduce(rank: int, store: Path, quick: bool) -> list[tuple[int, float]]:
    torch.set_num_threads(1)
    communicator = TorchCommunicator(rank, 2, FileMeeting(store), torch.device("cpu"))
    times = []
    for num_tokens in (1, 64, 512):
        x = torch.ones(num_tokens, HIDDEN)
        times.append((num_tokens, _median_s(partial(communicator.all_reduce, x), 20 if quick else 100)))
    communicator.close()
    return times


def _exchange_s(nbytes: int) -> float:
    """Send and receive `nbytes` at both ends of a socket pair at once."""
    left, right = socket.socketpair()
    payload = bytes(nbytes)

    def swap(end: socket.socket) -> None:
        sender = threading.Thread(target=end.sendall, args=(payload,))
        sender.start()
        received, buffer = 0, bytearray(nbytes)
        while received < nbytes:
            received += end.recv_into(memoryview(buffer)[received:])
        sender.join()

    def exchange() -> None:
        other = threading.Thread(target=swap, args=(right,))
        other.start()
        swap(left)
        other.join()

    with left, right:
        return _median_s(exchange, 20)


def _median_s(work: Callable[[], object], repetitions: int = 200) -> float:
    """Every rank must repeat as often as the others."""
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


if __name__ == "__main__":
    main()
