"""The host tier behind a GPU's pool: how fast pages go to pinned host memory and back, and what steps notice of it.

    python bench/gpu/host_tier.py [--parts start copies steps] [--quick] [--json]

Start: host memory is touched and pinned; the limit is `cudaHostAlloc` of as much.
Copies: the limit is one copy of as many bytes between the GPU and pinned memory, in the same run. `scattered` pages lie
in slots in any order. `both` saves and restores at once, the sum of both.
Steps: Llama-3-8B by shape decodes for 64 requests, made-up weights in bfloat16, as an overlapping scheduler does. Gaps
between its tokens are taken with nothing beside them, and with pages going down and up at every step: as many as the
prompts of such a GPU fill (`PROMPTS_GB_S`), and as many as the bus carries. Turns alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from forward_batches import PAGE_SIZE, decode_batch, greedy
from llama_8b import model_folder
from model_steps import DEVICE, random_pool, runner_of
from report import Report, arguments
from torch import Tensor

from diptych.checkpoints.source import open_model
from diptych.common.arrays import F64, I32
from diptych.engine.runner.gpu.copy_queues import stream_queues
from diptych.engine.runner.gpu.gpu_host_pages import GpuHostPages
from diptych.engine.runner.gpu.page_movement import PageMovement
from diptych.engine.runner.gpu.pinned_memory import PinnedMemory, pinned_for_gpus
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.values.batch import OverlapRunner, WaitForResult

GB: Final = 1e9
PARTS: Final = ("start", "copies", "steps")
PAGE_KIB: Final = (24, 256, 720, 2048)  # the last is Llama 3 8B with 16 tokens in bfloat16
COPY_MIB: Final = 1024
START_MIB: Final = 4096
BATCH_SIZE, CONTEXT = 64, 1024
NUM_MOVING: Final = 1024  # pages that go down and up beside the steps
PROMPTS_GB_S: Final = 6.0  # of KV: 45,000 tokens/s of 128 KiB
WANTED_GB_S: Final = 45.0
WANTED: Final = 1.03  # of the p99 gap
NUM_STEPS, NUM_TURNS = 300, 3


class Pages:
    """A pool, host memory for as many pages, and what copies them."""

    def __init__(self, pool: Tensor, num_slots: int, num_buffered: int) -> None:
        self.pinned = pinned_for_gpus(num_slots * pool.shape[1])
        buffer = torch.empty(num_buffered, pool.shape[1], dtype=torch.uint8, device=DEVICE)
        movement = PageMovement(pool, buffer, self.pinned.tensor.view(num_slots, -1))
        self.copier = GpuHostPages(movement, stream_queues(DEVICE, rank=0), num_slots, num_buffered)
        self._number = 0

    def save(self, pages: I32, slots: I32) -> None:
        self.copier.save(pages, slots)

    def restore(self, slots: I32, pages: I32) -> None:
        self._number += 1
        self.copier.restore(self._number, slots, pages)

    def exchange(self, saved: I32, to_slots: I32, from_slots: I32, restored: I32) -> None:
        self.save(saved, to_slots)
        self.restore(from_slots, restored)

    def close(self) -> None:
        self.copier.close()
        torch.cuda.synchronize()
        self.pinned.close()


def measure_start(report: Report) -> None:
    num_bytes = START_MIB << 20
    peer_s = timed(lambda: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
    memories: list[PinnedMemory] = []
    own_s = timed(lambda: memories.append(pinned_for_gpus(num_bytes)))
    memories[0].close()
    gib = num_bytes / 2**30
    report.row("gpu/host_tier", "pinning", own_s / gib, "s/GiB", peer_s / gib, "cudaHostAlloc", peer_s / own_s)


def measure_copies(report: Report, page_nbytes: int, rounds: int) -> None:
    num_pages = (COPY_MIB << 20) // page_nbytes
    num_bytes = num_pages * page_nbytes
    pool = torch.randint(0, 255, (2 * num_pages, page_nbytes), dtype=torch.uint8, device=DEVICE)
    tier = Pages(pool, 2 * num_pages, num_pages // 2)
    in_order, above = np.arange(num_pages, dtype=np.int32), np.arange(num_pages, 2 * num_pages, dtype=np.int32)
    scattered = np.random.default_rng(0).permutation(in_order)
    host, device = tier.pinned.tensor[:num_bytes], pool.view(-1)[:num_bytes]
    limits = {
        "save": best(lambda: host.copy_(device, non_blocking=True), rounds),
        "restore": best(lambda: device.copy_(host, non_blocking=True), rounds),
    }
    for order, slots in (("neighbours", in_order), ("scattered", scattered)):
        works: dict[str, Callable[[], object]] = {
            "save": partial(tier.save, in_order, slots),
            "restore": partial(tier.restore, slots, in_order),
            "both": partial(tier.exchange, in_order, slots, slots + np.int32(num_pages), above),
        }
        for name, work in works.items():
            amount = num_bytes * (2 if name == "both" else 1)
            limit_s = limits.get(name, max(limits.values()))
            value, limit = amount / best(work, rounds) / GB, amount / limit_s / GB
            calls = {"host ms": 1e3 * queued_s(work), "wanted": WANTED_GB_S * amount / num_bytes}
            case = f"{name}, {order}, {page_nbytes >> 10} KiB"
            report.row("gpu/host_tier", case, value, "GB/s", limit, "one pinned copy", value / limit, calls)
    tier.close()


def measure_steps(report: Report, num_steps: int, num_turns: int) -> None:
    num_pages = BATCH_SIZE * CONTEXT // PAGE_SIZE
    with model_folder() as folder:
        source = open_model(str(folder), "dummy")
        kv = random_pool(source.config, num_pages + NUM_MOVING)
        runner = runner_of(load_model(source, kv, ModelOptions(dtype="bfloat16")), with_graphs=True)
    pool = kv.view(torch.uint8).view(len(kv), -1)
    tier = Pages(pool, NUM_MOVING, NUM_MOVING // 2)
    pace = Decoding(runner, num_pages, tier)
    usual_s = float(np.median(pace.gaps(num_steps, 0)))
    most = int(0.8 * WANTED_GB_S * GB * usual_s / pool.shape[1])
    cases = {"nothing": 0, "prompts": max(1, int(PROMPTS_GB_S * GB * usual_s / pool.shape[1])), "bus": most}
    found: dict[str, list[F64]] = {name: [] for name in cases}
    for _ in range(num_turns):
        for name, moved in cases.items():
            found[name].append(pace.gaps(num_steps, min(moved, NUM_MOVING // 2)))
    quiet = {q: percentile(found["nothing"], q) for q in (50, 99)}
    for name, moved in cases.items():
        for q, quiet_s in quiet.items():
            gap_s, gb_s = percentile(found[name], q), moved * pool.shape[1] / usual_s / GB
            case = f"B {BATCH_SIZE}, L {CONTEXT}: gap p{q}, {name} ({gb_s:.0f} GB/s each way)"
            told = {"wanted": 1e3 * WANTED * quiet_s}
            report.row("gpu/host_tier", case, 1e3 * gap_s, "ms", 1e3 * quiet_s, "with nothing", quiet_s / gap_s, told)
    tier.close()


class Decoding:
    """Steps of the same requests, over and over, each queued while the one before runs."""

    def __init__(self, runner: OverlapRunner, num_pages: int, tier: Pages) -> None:
        self._runner, self._tier = runner, tier
        self._batch = decode_batch(BATCH_SIZE, CONTEXT, num_pages)
        self._moving = np.arange(num_pages, num_pages + NUM_MOVING, dtype=np.int32)
        self._open = False

    def gaps(self, num_steps: int, moved: int) -> F64:
        """Return seconds between results, while `moved` pages go down and as many come back at each step."""
        first, times = self._batch, list[float]()
        pending = self._queue(first.input_ids, 0)
        for _ in range(num_steps + 20):
            queued = self._queue(-1 - np.arange(BATCH_SIZE), moved)
            pending()
            times.append(time.perf_counter())
            pending = queued
        pending()
        torch.cuda.synchronize()
        return np.diff(times)[20:]

    def _queue(self, input_ids: object, moved: int) -> WaitForResult:
        if moved:
            self._move(moved)
        batch = replace(self._batch, input_ids=np.asarray(input_ids))
        return self._runner.sample(batch, self._runner.logits(batch), greedy(BATCH_SIZE))

    def _move(self, moved: int) -> None:
        """Restores follow each other: the next begins when the host has heard of the last."""
        half = NUM_MOVING // 2
        slots = np.random.default_rng(0).permutation(half).astype(np.int32)[:moved]
        self._tier.save(self._moving[:moved], slots)
        if self._open and not self._tier.copier.restored():
            return
        self._open = True
        self._tier.restore(slots + np.int32(half), self._moving[half : half + moved])


def percentile(turns: list[F64], q: int) -> float:
    """Return the median of the turns' percentiles, seconds."""
    return float(np.median([np.percentile(each, q) for each in turns]))


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def best(work: Callable[[], object], rounds: int) -> float:
    work()
    return min(timed(work) for _ in range(rounds))


def queued_s(work: Callable[[], object]) -> float:
    """Return how long the host takes to queue it."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    queued_s = time.perf_counter() - began_s
    torch.cuda.synchronize()
    return queued_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    rounds, num_steps, num_turns = (3, 100, 1) if options.quick else (7, NUM_STEPS, NUM_TURNS)
    with Report(as_json=options.json) as report:
        if "start" in options.parts:
            measure_start(report)
        for page_kib in PAGE_KIB if "copies" in options.parts else ():
            measure_copies(report, page_kib << 10, rounds)
        if "steps" in options.parts:
            measure_steps(report, num_steps, num_turns)


if __name__ == "__main__":
    main()
