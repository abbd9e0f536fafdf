"""Speed of the host tier of the prefix cache: pages to host memory and back, and what that saves.

    python bench/host_cache.py [--threads N] [--model smollm2] [--quick] [--json]

Copies: the limit is one memcpy of as many bytes between buffers of the same sizes, in turns, the best round counts.
`neighbours` are pages and slots in order, which copy as one run; `scattered` ones go page by page.
A prompt: `restore` is a whole admission whose prefix lies in host memory (match, pages, copies, books); beside it, as a
peer, the model computing the same tokens again on this machine. The limit is memcpy of the prompt's KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from report import Report, arguments

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import I64
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.runner.kv_pool import kv_view
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.batch_builder import build_batch
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Chunk, new_step
from diptych.generation.sampling_params import SamplingParams

PAGE_SIZE = 16
PAGE_KIB = (64, 720, 2048)  # the middle one is SmolLM2 in float32, the last Llama 3 8B in bfloat16
COPY_MIB = 256
PROMPT_LENS = (512, 2048)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of the model")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    rounds = 3 if options.quick else 7
    with Report(as_json=options.json) as report:
        for page_kib in PAGE_KIB:
            measure_copies(report, page_kib << 10, rounds)
        for prompt_len in PROMPT_LENS[: 1 if options.quick else None]:
            measure_prompt(report, open_model(options.model), options.threads, prompt_len, rounds)


def measure_copies(report: Report, page_nbytes: int, rounds: int) -> None:
    """Copies of many pages, against memcpy."""
    num_pages = (COPY_MIB << 20) // page_nbytes
    pool = np.ones(num_pages * page_nbytes, np.uint8)
    other = np.ones_like(pool)
    host = HostPages(pool.data, page_nbytes, num_pages)
    in_order = np.arange(num_pages, dtype=np.int32)
    scattered = np.random.default_rng(0).permutation(in_order)
    works: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(other, pool),
        "save/neighbours": lambda: host.save(in_order, in_order),
        "save/scattered": lambda: host.save(scattered, in_order),
        "restore/neighbours": lambda: host.restore(0, in_order, in_order),
        "restore/scattered": lambda: host.restore(0, in_order, scattered),
    }
    best = best_times(works, rounds)
    limit = len(pool) / best.pop("memcpy") / 1e9
    for name, time_s in best.items():
        value = len(pool) / time_s / 1e9
        case = f"{name}/{page_nbytes >> 10}KiB"
        report.row("host_cache", case, value, "GB/s", limit, "memcpy, same run", value / limit)


def measure_prompt(report: Report, source: ModelSource, num_threads: int, prompt_len: int, rounds: int) -> None:
    """A prompt whose KV has gone to host memory, against computing it."""
    num_pages = prompt_len // PAGE_SIZE + 2
    layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
    pool = memoryview(bytearray(layout.nbytes))
    runner = ModelRunner(source, kv_view(pool, layout), dtype="float32", num_threads=num_threads)
    cache = KvCache(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_requests=1,
        max_tokens_per_request=prompt_len + 1,
        tiers=[HostTier(2 * num_pages, HostPages(pool, layout.page_nbytes, 2 * num_pages))],
    )
    prompt = np.random.default_rng(0).integers(100, 10_000, prompt_len + 1)
    other = prompt[::-1].copy()
    compute_s = min(compute(runner, cache, one) for one in (prompt, other))
    restore_s = min(restore(cache, one) for _ in range(rounds) for one in (prompt, other))
    kv = np.ones(prompt_len // PAGE_SIZE * layout.page_nbytes, np.uint8)
    copy = np.ones_like(kv)
    memcpy_s = best_times({"memcpy": lambda: np.copyto(copy, kv)}, rounds)["memcpy"]
    report.row(
        "host_cache",
        f"prompt/{prompt_len}",
        prompt_len / restore_s,
        "tokens/s",
        prompt_len / memcpy_s,
        "memcpy, same run",
        memcpy_s / restore_s,
        {"recompute": prompt_len / compute_s},
    )


def compute(runner: ModelRunner, cache: KvCache, prompt: I64) -> float:
    """Compute a prompt that is cached nowhere, and keep it; return the time of the forward pass."""
    request = admitted(cache, prompt)
    assert request.cached_len == 0
    chunk = Chunk(request, 0, request.num_tokens, is_last=True)
    batch = build_batch(new_step((), (chunk,)), cache.page_table, PAGE_SIZE)
    start_s = time.perf_counter()
    runner.logits(batch)
    time_s = time.perf_counter() - start_s
    request.computed_len = request.num_tokens
    cache.retire(request)
    return time_s


def restore(cache: KvCache, prompt: I64) -> float:
    """Admit a prompt whose KV is in host memory; return the time that its way back takes.

    Before, its pages are freed, which sends the prompt that has them to host memory.
    """
    make_room(cache)
    start_s = time.perf_counter()
    request = admitted(cache, prompt)
    time_s = time.perf_counter() - start_s
    assert request.cached_len == len(prompt) - 1
    request.computed_len = request.num_tokens - 1
    cache.retire(request)
    return time_s


def make_room(cache: KvCache) -> None:
    """Take every page with a request that computes nothing."""
    request = admitted(cache, np.zeros(cache.pool.capacity * PAGE_SIZE, np.int64))
    cache.drop(request)


def admitted(cache: KvCache, prompt: I64) -> Request:
    request = new_request(1, prompt.astype(np.int64), SamplingParams(max_tokens=1))
    assert cache.admit(request)
    return request


def best_times(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best time of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for name, work in rounds_of(works, rounds):
        start_s = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - start_s)
    return {name: min(each) for name, each in times.items()}


def rounds_of(works: Mapping[str, Callable[[], object]], rounds: int) -> Iterable[tuple[str, Callable[[], object]]]:
    """Yield every work `rounds` times, and once more before for warming up."""
    for work in works.values():
        work()
    for _ in range(rounds):
        yield from works.items()


if __name__ == "__main__":
    main()
