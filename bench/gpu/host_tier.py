"""The host tier behind a GPU's pool: how fast pages go to pinned host memory and back, and what steps notice of it.

    python bench/gpu/host_tier.py [--parts start copies steps] [--quick] [--json]

Start: host memory is touched and pinned; the limit is `cudaHostAlloc` of as much.
Copies: the limit is one copy of as many bytes between the GPU and pinned memory, in the same run; of `both`, which is
the sum of two directions at once, two such copies at once. `scattered` pages lie in slots in any order.
Steps: Llama-3-8B by shape decodes for 64 requests, made-up weights in bfloat16, as an overlapping scheduler does. Gaps
between its tokens are taken with nothing beside them, and with pages going down and up: at every step as many as the
prompts of such a GPU fill (`PROMPTS_GB_S`), at every step nearly as many as the bus carries one way, and 512 each way
at once every 40 steps. Turns alternate.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from diptych.common.arrays import F64, I32, I64
from diptych.engine.runner.gpu.bus import KernelBus
from diptych.engine.runner.gpu.copy_queues import stream_queues
from diptych.engine.runner.gpu.gpu_host_pages import GpuHostPages
from diptych.engine.runner.gpu.page_movement import PageMovement
from diptych.engine.runner.gpu.piece_copies import copies_of_this_driver
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
BUS_GB_S: Final = 40.0
WANTED_GB_S: Final = 45.0
WANTED: Final = 1.03  # of the p99 gap
NUM_STEPS, NUM_TURNS, WARM_STEPS = 250, 2, 20
HALF: Final = NUM_MOVING // 2  # of the pages and slots go down, the others up
MOST_OPEN: Final = 2  # restores at once


class Pages:
    """A pool, host memory for as many pages, and what copies them."""

    def __init__(self, pool: Tensor, num_slots: int, num_buffered: int) -> None:
        self.pinned = pinned_for_gpus(num_slots * pool.shape[1])
        buffer = torch.empty(num_buffered, pool.shape[1], dtype=torch.uint8, device=DEVICE)
        movement = PageMovement(pool, buffer, self.pinned.tensor.view(num_slots, -1), copies_of_this_driver())
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
    limits = plain_copies(tier.pinned.tensor, pool.view(-1), num_bytes, rounds)
    for order, slots in (("neighbours", in_order), ("scattered", scattered)):
        works: dict[str, Callable[[], object]] = {
            "save": partial(tier.save, in_order, slots),
            "restore": partial(tier.restore, slots, in_order),
            "both": partial(tier.exchange, in_order, slots, slots + np.int32(num_pages), above),
        }
        for name, work in works.items():
            amount = num_bytes * (2 if name == "both" else 1)
            value, limit = amount / best(work, rounds) / GB, amount / limits[name] / GB
            calls = {"host ms": 1e3 * queued_s(work), "wanted": WANTED_GB_S * amount / num_bytes}
            case = f"{name}, {order}, {page_nbytes >> 10} KiB"
            report.row("gpu/host_tier", case, value, "GB/s", limit, "pinned copies", value / limit, calls)
    tier.close()


def plain_copies(host: Tensor, device: Tensor, num_bytes: int, rounds: int) -> dict[str, float]:
    """Return seconds of one copy of so many bytes in each direction, and of both at once."""
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]

    def save() -> None:
        with torch.cuda.stream(streams[0]):
            host[:num_bytes].copy_(device[:num_bytes], non_blocking=True)

    def restore() -> None:
        with torch.cuda.stream(streams[1]):
            device[num_bytes:].copy_(host[num_bytes:], non_blocking=True)

    def both() -> None:
        save()
        restore()

    return {"save": best(save, rounds), "restore": best(restore, rounds), "both": best(both, rounds)}


def measure_steps(report: Report, num_steps: int, num_turns: int) -> None:
    num_pages = BATCH_SIZE * CONTEXT // PAGE_SIZE
    with model_folder() as folder:
        source = open_model(str(folder), "dummy")
        kv = random_pool(source.config, num_pages + NUM_MOVING)
        model = load_model(source, kv, ModelOptions(dtype="bfloat16"))
        runner = runner_of(model, with_graphs=True, bus=KernelBus(DEVICE))
    pool = kv.view(torch.uint8).view(len(kv), -1)
    tier = Pages(pool, NUM_MOVING, NUM_MOVING // 2)
    decoding = Decoding(runner, num_pages, tier)
    usual_s = float(np.median(decoding.gaps(num_steps, NOTHING)))
    prompts, bus = (max(1, int(gb_s * GB * usual_s / pool.shape[1])) for gb_s in (PROMPTS_GB_S, BUS_GB_S))
    cases = {
        "nothing": NOTHING,
        "as prompts fill": Traffic(prompts, prompts),
        "down": Traffic(bus, 0),
        "up": Traffic(0, bus),
        "a prompt of 8,192 at once": Traffic(HALF, HALF, every=40),
    }
    found: dict[str, list[F64]] = {name: [] for name in cases}
    gc.disable()  # it would be in the slowest gaps
    for _ in range(num_turns):
        for name, traffic in cases.items():
            found[name].append(decoding.gaps(num_steps, traffic))
    for q in (50, 99):
        quiet_s = percentile(found["nothing"], q)
        for name, traffic in cases.items():
            gap_s, gb_s = percentile(found[name], q), traffic.most_a_step * pool.shape[1] / usual_s / GB
            case = f"B {BATCH_SIZE}, L {CONTEXT}: gap p{q}, {name} ({gb_s:.0f} GB/s)"
            wanted = {"wanted": 1e3 * WANTED * quiet_s}
            report.row("gpu/host_tier", case, 1e3 * gap_s, "ms", 1e3 * quiet_s, "nothing", quiet_s / gap_s, wanted)
    tier.close()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Pages that move at once, at each step or every so many steps."""

    down: int
    up: int
    every: int = 1

    @property
    def most_a_step(self) -> float:
        return max(self.down, self.up) / self.every


NOTHING: Final = Traffic(0, 0)


class Decoding:
    """Steps of the same requests, over and over, each queued while the one before runs."""

    def __init__(self, runner: OverlapRunner, num_pages: int, tier: Pages) -> None:
        self._runner, self._tier = runner, tier
        self._batch = decode_batch(BATCH_SIZE, CONTEXT, num_pages)
        self._moving = np.arange(num_pages, num_pages + NUM_MOVING, dtype=np.int32)
        self._slots = np.random.default_rng(0).permutation(HALF).astype(np.int32)
        self._num_open = 0  # restores

    def gaps(self, num_steps: int, traffic: Traffic) -> F64:
        """Return seconds between results."""
        times = list[float]()
        pending = self._queue(self._batch.input_ids, NOTHING)
        for step in range(num_steps + WARM_STEPS):
            queued = self._queue(-1 - np.arange(BATCH_SIZE), NOTHING if step % traffic.every else traffic)
            pending()
            times.append(time.perf_counter())
            pending = queued
        pending()
        torch.cuda.synchronize()
        return np.diff(times)[WARM_STEPS:]

    def _queue(self, input_ids: I64, traffic: Traffic) -> WaitForResult:
        if traffic.down:
            self._tier.save(self._moving[: traffic.down], self._slots[: traffic.down])
        self._num_open -= len(self._tier.copier.restored())
        if traffic.up and self._num_open < MOST_OPEN:
            up = slice(HALF, HALF + traffic.up)
            self._num_open += 1
            self._tier.restore(self._slots[: traffic.up] + np.int32(HALF), self._moving[up])
        batch = replace(self._batch, input_ids=input_ids)
        return self._runner.sample(batch, self._runner.logits(batch), greedy(BATCH_SIZE))


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
