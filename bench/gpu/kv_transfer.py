"""Hands the KV of whole requests from one GPU to another of the same host, between two processes, by every path.

Pages are scattered on both sides. Time is from `write_pages` with a note until its `OpDone`: every byte is there. The
limit is a device-to-device copy, measured in the same run; of staging, what the same link reaches between pools in host
memory. Beside it NIXL's Python API, where it is installed. What one pays beside its bytes is told apart: *engine*
is the same by the transport's own clock, without waking who waits for it, and *kernel* the mover alone, by the GPU's.
Needs two GPUs: `bench/gpu/run.sh transfer`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from kv_end import End, Target, layout_8b, layout_latents, linked_pair
from report import Report, arguments

from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import OpDone, PageWrite

MB: Final = 1 << 20
REQUESTS_MB: Final = (20, 64, 512, 4096)
STAGED_MB: Final = (20, 512)
ROUNDS: Final = 15
WARM_S: Final = 0.3
CASE_TIMEOUT_S: Final = 150


def emit(case: str, nbytes: float, seconds: Sequence[float], **beside: Sequence[float]) -> None:
    """The median counts; the best is told, too, and medians of what was measured `beside`."""
    found = {"median": statistics.median(seconds), "best": min(seconds)}
    found |= {what: statistics.median(times) for what, times in beside.items()}
    print(json.dumps([case, {what: nbytes / some / 1e9 for what, some in found.items()}]), flush=True)


class Pair:
    """Two linked ends, and requests between them."""

    def __init__(self, memory: str, transports: str, layout: PoolLayout) -> None:
        self.layout = layout
        self.end: End
        self.target: Target
        self.end, self.target = linked_pair(memory, transports, self.layout)
        print(self.end.transport.describe(2), self.end.transport.paths(2), file=sys.stderr, flush=True)

    def request(self, megabytes: int, seed: int, **options: Any) -> PageWrite:
        random, count = np.random.default_rng(seed), max(1, megabytes * MB // self.layout.page_nbytes)
        src, dst = (random.permutation(self.layout.num_pages)[:count] for _ in range(2))
        return PageWrite(src, dst, **options)

    def hand_off(self, write: PageWrite, flow: Flow = Flow()) -> tuple[float, OpDone]:  # noqa: B008
        """Return the seconds until its end is known here, and its end."""
        began = time.perf_counter()
        op = self.end.transport.write_pages(2, write, b"done", flow)
        done = self.end.wait(lambda event: isinstance(event, OpDone) and event.op == op)
        seconds = time.perf_counter() - began
        assert isinstance(done, OpDone)
        assert done.error is None, done.error
        return seconds, done

    def verify(self, megabytes: int) -> None:
        write = self.request(megabytes, 99)
        digest = self.hand_off(write, Flow(with_digest=True))[1].digest
        if digest is None or digest != self.target.digest(np.asarray(write.dst, dtype=np.int64)):
            raise RuntimeError("the target's pages differ from ours")

    def warm_up(self) -> None:
        """GPUs and their links wake up slowly."""
        began, write = time.perf_counter(), self.request(256, 0)
        while time.perf_counter() < began + WARM_S:
            self.hand_off(write)

    def measure(self, case: str, path: str, sizes: tuple[int, ...]) -> None:
        self.end.transport.use_path(2, path)
        self.warm_up()
        for megabytes in sizes:
            write = self.request(megabytes, megabytes)
            nbytes = len(write.src) * self.layout.page_nbytes
            times, ends = zip(*(self.hand_off(write) for _ in range(ROUNDS)), strict=True)
            own = [end.seconds for end in ends]
            emit(f"{case}/{self.layout.page_size} tokens/{megabytes} MiB", nbytes, times, engine=own)
        self.verify(min(256, sizes[-1]))

    def close(self) -> None:
        self.target.close()
        self.end.transport.close()


def measure_limit() -> None:
    import torch

    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{n}").random_() for n in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    target.copy_(source)
    events[0].record()
    for _ in range(8):
        target.copy_(source)
    events[1].record()
    torch.cuda.synchronize()
    emit("limit", 8 * source.nbytes, [events[0].elapsed_time(events[1]) / 1e3])


def measure_kernel() -> None:
    """The mover alone, as the engine launches it: a piece of up to 32 MiB each, on two streams in turn."""
    import torch

    from diptych.kernels.gpu.pages.page_mover import move_pages
    from diptych.kernels.gpu.pages.transfer_images import MOVER_PROGRAMS

    page_nbytes, streams = layout_8b(5120 * MB, 16).page_nbytes, [torch.cuda.Stream() for _ in range(2)]
    src, dst = (torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{n}") for n in range(2))
    dst.copy_(src)  # torch opens the peer's memory with its first copy
    done, count = torch.zeros(1, dtype=torch.int32, device="cuda:0"), 32 * MB // page_nbytes
    places = [torch.randperm(len(src) // page_nbytes, device="cuda:0") for _ in range(2)]
    began, *ends = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for megabytes in REQUESTS_MB[:-1]:
        num_pages, times = megabytes * MB // page_nbytes, []
        for _ in range(2 + ROUNDS):
            torch.cuda.synchronize()
            began.record(streams[0])
            streams[1].wait_event(began)
            for turn, first in enumerate(range(0, num_pages, count)):
                with torch.cuda.stream(streams[turn % 2]):
                    here, there = (each[first : min(num_pages, first + count)] for each in places)
                    move_pages(
                        src.data_ptr(), dst.data_ptr(), here, there, page_nbytes, done, num_programs=MOVER_PROGRAMS
                    )
            for end, stream in zip(ends, streams, strict=True):
                end.record(stream)
            torch.cuda.synchronize()
            times.append(max(began.elapsed_time(end) for end in ends) / 1e3)
        emit(f"mover, kernel/16 tokens/{megabytes} MiB", num_pages * page_nbytes, times[2:])


def measure_device() -> None:
    for page_size in (16, 64):
        pair = Pair("cuda", "auto", layout_8b(5120 * MB, page_size))
        for path in ("mover", "put"):
            pair.measure(path, path, REQUESTS_MB)
        pair.close()


def measure_latents() -> None:
    pair = Pair("cuda", "auto", layout_latents(5120 * MB, 16))
    for path in ("mover", "put"):
        pair.measure(f"{path}, latents", path, REQUESTS_MB)
    pair.close()


def measure_layers() -> None:
    """A quarter of the layers at a time, as behind a forward pass; and one hand-off after another without a pause."""
    pair = Pair("cuda", "auto", layout_8b(5120 * MB, 16))
    for path in ("mover", "put"):
        pair.end.transport.use_path(2, path)
        pair.warm_up()
        write = pair.request(512, 1, layers=(8, 16))
        nbytes, times = len(write.src) * pair.layout.page_nbytes // 4, [pair.hand_off(write)[0] for _ in range(ROUNDS)]
        emit(f"{path}/16 tokens, 8 of 32 layers/128 MiB", nbytes, times)
    pair.end.transport.use_path(2, "mover")
    writes, began = [pair.request(64, seed) for seed in range(64)], time.perf_counter()
    ops = {pair.end.transport.write_pages(2, write, b"", Flow(stream=n)) for n, write in enumerate(writes)}

    def is_last(event: object) -> bool:
        ops.discard(getattr(event, "op", 0))
        return not ops

    pair.end.wait(is_last)
    emit("mover/16 tokens/64 requests of 64 MiB at once", 64 * 64 * MB, [time.perf_counter() - began])
    pair.close()


def measure_staged() -> None:
    for page_size in (16, 64):
        pair = Pair("cuda", "tcp", layout_8b(1024 * MB, page_size))
        pair.measure("staged", "staged", STAGED_MB)
        pair.close()


def measure_host() -> None:
    for page_size in (16, 64):
        pair = Pair("host", "tcp", layout_8b(1024 * MB, page_size))
        pair.measure("host memory", "message", STAGED_MB)
        pair.close()


def measure_nixl() -> None:
    import kv_nixl

    for page_size in (16, 64):
        for megabytes, nbytes, times in kv_nixl.measure(layout_8b(5120 * MB, page_size), REQUESTS_MB, ROUNDS):
            emit(f"nixl/{page_size} tokens/{megabytes} MiB", nbytes, times)


CASES: Final = {
    "limit": measure_limit,
    "kernel": measure_kernel,
    "device": measure_device,
    "latents": measure_latents,
    "layers": measure_layers,
    "staged": measure_staged,
    "host": measure_host,
    "nixl": measure_nixl,
}


def run_case(name: str) -> dict[str, dict[str, float]]:
    """Measure in a process of its own, so that trouble of one case costs no other."""
    command = [sys.executable, str(Path(__file__)), "--case", name]
    try:
        out = subprocess.run(command, stdout=subprocess.PIPE, timeout=CASE_TIMEOUT_S, check=False).stdout
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        print(f"{name}: not within {CASE_TIMEOUT_S} s", file=sys.stderr)
    lines = [line for line in out.decode().splitlines() if line.startswith("[")]
    return dict(json.loads(line) for line in lines)


def write_table(report: Report, speeds: dict[str, dict[str, float]]) -> None:
    copy = speeds.pop("limit")["median"]
    for case, beside in speeds.items():
        path, _, what = case.partition("/")
        speed, peers = beside["median"], {name: each for name, each in beside.items() if name != "median"}
        nixl, host = speeds.get(f"nixl/{what}"), speeds.get(f"host memory/{what}")
        if path == "staged" and host:
            limit = host["median"]
            report.row("gpu/kv", case, speed, "GB/s", limit, "host memory, same link", speed / limit, peers)
        elif path.startswith(("mover", "put")):
            peers |= {"nixl": nixl["median"]} if nixl else {}
            report.row("gpu/kv", case, speed, "GB/s", copy, "device-to-device copy", speed / copy, peers)
        else:
            report.row("gpu/kv", case, speed, "GB/s", peers=peers)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", choices=CASES, help="measure one case in this process, as lines of JSON")
    parser.add_argument("--only", choices=CASES, action="append", help="measure these cases alone, and the limit")
    options = parser.parse_args()
    if options.case:
        CASES[options.case]()
        sys.stdout.flush()
        os._exit(0)  # NIXL ends in a segmentation fault otherwise
    speeds: dict[str, dict[str, float]] = {}
    for name in CASES:
        if not options.only or name in ("limit", *options.only):
            speeds |= run_case(name)
    with Report(as_json=options.json) as report:
        write_table(report, speeds)


if __name__ == "__main__":
    main()
