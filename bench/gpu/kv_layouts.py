"""Hands 512 MiB of KV from one GPU to a pool of another layout on another GPU, between two processes of a host.

Pages are scattered on both sides, and moved with their digests. Time is from `write_pages` with a note until its
`OpDone`; bytes are those that land. The limit is a device-to-device copy, and beside each case is that of equal layouts
by the same path. Unpacking is compared with a copy inside of one GPU. `bench/gpu/run.sh layouts` runs it on two GPUs;
where there is one, both pools are on it: then the way is as fast as memory, and what packing adds is measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from kv_end import End, Target, layout_8b, linked_pair
from report import Report, arguments

from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import OpDone, PageWrite

MB: Final = 1 << 20
POOL_NBYTES: Final = 4096 * MB
MOVED_NBYTES: Final = 512 * MB
ROUNDS: Final = 15
WARM_S: Final = 0.3
CASE_TIMEOUT_S: Final = 100
PATHS: Final = ("mover", "put", "staged")

PAIRS: Final = {
    "equal layouts": (layout_8b(POOL_NBYTES, 16), layout_8b(POOL_NBYTES, 16)),
    "16 to 64 tokens": (layout_8b(POOL_NBYTES, 16), layout_8b(POOL_NBYTES, 64)),
    "64 to 16 tokens": (layout_8b(POOL_NBYTES, 64), layout_8b(POOL_NBYTES, 16)),
    "one rank to two": (layout_8b(POOL_NBYTES, 16), layout_8b(POOL_NBYTES, 16, num_ranks=2)),
    "two ranks to one": (layout_8b(POOL_NBYTES, 16, num_ranks=2), layout_8b(POOL_NBYTES, 16)),
    "bfloat16 to FP8": (layout_8b(POOL_NBYTES, 16), layout_8b(POOL_NBYTES, 16, "fp8_e4m3")),
    "FP8 to bfloat16": (layout_8b(POOL_NBYTES, 16, "fp8_e4m3"), layout_8b(POOL_NBYTES, 16)),
}


class Pair:
    """Two linked ends whose pools differ, and hand-offs between them."""

    def __init__(self, src: PoolLayout, dst: PoolLayout) -> None:
        self.layouts = src, dst
        self.end: End
        self.target: Target
        self.end, self.target = linked_pair("cuda", "auto", src, dst)
        whole = self.hand_off(self.request(1, 1))[1]  # the bytes that land in one page of the target
        self.num_pages = MOVED_NBYTES // whole

    def request(self, num_pages: int, seed: int) -> PageWrite:
        src, dst = self.layouts
        random = np.random.default_rng(seed)
        num_src = -(-num_pages * dst.page_size // src.page_size)
        return PageWrite(random.permutation(src.num_pages)[:num_src], random.permutation(dst.num_pages)[:num_pages])

    def hand_off(self, write: PageWrite) -> tuple[float, int]:
        """Return the seconds, and the bytes that were moved."""
        sent, began = self.end.transport.describe(2).bytes_sent, time.perf_counter()
        op = self.end.transport.write_pages(2, write, b"done", Flow(with_digest=True))
        done = self.end.wait(lambda event: isinstance(event, OpDone) and event.op == op)
        seconds = time.perf_counter() - began
        assert isinstance(done, OpDone)
        assert done.error is None, done.error
        self.digest = done.digest
        return seconds, self.end.transport.describe(2).bytes_sent - sent

    def measure(self, path: str) -> float:
        """Return GB/s."""
        self.end.transport.use_path(2, path)
        write, began, rounds = self.request(self.num_pages, 2), time.perf_counter(), ROUNDS if path != "staged" else 3
        while time.perf_counter() < began + WARM_S:
            self.hand_off(write)
        median = statistics.median(self.hand_off(write)[0] for _ in range(rounds))
        moved = self.hand_off(write)[1]
        if moved == len(write.dst) * self.layouts[1].page_nbytes:  # else other ranks have the rest
            assert self.digest == self.target.digest(np.asarray(write.dst, np.int64)), "the target's pages differ"
        return moved / median / 1e9

    def measure_unpacking(self) -> float:
        """Return GB/s of pages that become whole."""
        pages = np.asarray(self.request(self.num_pages, 2).dst, np.int64)
        median = statistics.median(self.target.unpack(1, pages) for _ in range(ROUNDS))
        return len(pages) * self.layouts[1].page_nbytes / median / 1e9


def copy_speed(target: str) -> float:
    """Return GB/s of a copy from the first GPU."""
    source, copied = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0"), torch.empty(1 << 30, dtype=torch.uint8)
    copied = copied.to(target)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    copied.copy_(source)
    events[0].record()
    for _ in range(8):
        copied.copy_(source)
    events[1].record()
    torch.cuda.synchronize()
    return float(8 * source.nbytes / (events[0].elapsed_time(events[1]) / 1e3) / 1e9)


def run_case(name: str) -> dict[str, float]:
    """Measure in a process of its own: one UCX a process. Speeds by what was done."""
    command = [sys.executable, str(Path(__file__)), "--case", name]
    try:
        out = subprocess.run(command, stdout=subprocess.PIPE, timeout=CASE_TIMEOUT_S, check=False, text=True).stdout
    except subprocess.TimeoutExpired:
        print(f"{name}: not within {CASE_TIMEOUT_S} s", file=sys.stderr)
        return {}
    return {what: float(speed) for what, _, speed in (line.partition(":") for line in out.splitlines())}


def measure_case(name: str) -> None:
    pair = Pair(*PAIRS[name])
    for path in PATHS:
        if path in pair.end.transport.paths(2):
            print(f"{path}:{pair.measure(path)}", flush=True)
    if name == "two ranks to one":
        print(f"unpacking:{pair.measure_unpacking()}", flush=True)
    pair.target.close()
    os._exit(0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", choices=PAIRS, help="measure one case in this process")
    options = parser.parse_args()
    if options.case:
        measure_case(options.case)
    between, inside = copy_speed(f"cuda:{min(1, torch.cuda.device_count() - 1)}"), copy_speed("cuda:0")
    equal: dict[str, float] = {}
    with Report(as_json=options.json) as report:
        for name in PAIRS:
            speeds = run_case(name)
            unpacking = speeds.pop("unpacking", None)
            equal = equal or speeds
            for path, speed in speeds.items():
                peers = {"equal layouts": equal.get(path, 0.0)}
                case = f"{path}/{name}/512 MiB"
                report.row("gpu/kv", case, speed, "GB/s", between, "device-to-device copy", speed / between, peers)
            if unpacking is not None:
                case = f"unpacking/{name}/1 GiB"
                report.row("gpu/kv", case, unpacking, "GB/s", inside, "copy inside of a GPU", unpacking / inside)


if __name__ == "__main__":
    main()
