"""What it costs a router to know who has cached what: naming a prompt's pages, keeping the index, looking in it.

    python bench/prefix_index.py [--quick] [--json]

The limits: XXH3 over the same bytes at one go, and reads of as much memory at random places. The peers are what Python
has of its own: a set of hashes for each worker, and for the name of a page a call of SHA-256 or XXH3 from Python.
"""

from __future__ import annotations

import gc
import hashlib
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import psutil
import xxhash
from report import Report, arguments

from diptych.common.arrays import I64, U64
from diptych.engine.cache.kv_feed import MAX_HASHES
from diptych.generation.page_hash import page_hashes
from diptych.router.choose import page_chain
from diptych.router.choose.cached_prefixes import ApproximateIndex
from diptych.router.choose.prefix_index import KvNews, PrefixIndex
from diptych.tokens.packed_tokens import TOKEN_TYPE

PAGE_SIZE = 16
PROMPT_LEN = 39_000  # tokens
TEXT_BYTES = 220_000
TEXT_BLOCK = 512
WORKERS = (8, 64)
STEP_PAGES = 8  # told after one step of a busy worker
RNG = np.random.default_rng(0)


def main() -> None:
    options = arguments(__doc__).parse_args()
    with Report(as_json=options.json) as report:
        measure_names(report)
        measure_memory(report, 64 * 32_768 if options.quick else 64 * 163_840)
        for num_workers in WORKERS:
            measure_prompts(report, num_workers)
        measure_guesses(report)


def measure_names(report: Report) -> None:
    tokens = RNG.integers(0, 150_000, PROMPT_LEN)
    packed = array(TOKEN_TYPE, tokens.tolist())
    limit_s = best(lambda: xxhash.xxh3_64_intdigest(tokens.tobytes()))
    took_s = best(lambda: page_chain.page_hashes(np.asarray(packed), PAGE_SIZE))
    peers = {"SHA-256 a page": sha256_s(tokens), "XXH3 a page": best(lambda: page_hashes(tokens, PAGE_SIZE))}
    row_ms(report, f"name the pages of {PROMPT_LEN} tokens", took_s, limit_s, "XXH3 at one go", peers)
    utf8 = RNG.integers(32, 127, TEXT_BYTES, np.uint8).tobytes()
    limit_s = best(lambda: xxhash.xxh3_64_intdigest(utf8))
    row_ms(
        report,
        f"name the blocks of {TEXT_BYTES} B text",
        best(lambda: page_chain.text_hashes(utf8, 512)),
        limit_s,
        "XXH3 at one go",
    )


def sha256_s(tokens: I64) -> float:
    def name() -> None:
        previous = b""
        for start in range(0, len(tokens) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
            previous = hashlib.sha256(previous + tokens[start : start + PAGE_SIZE].tobytes()).digest()

    return best(name)


def measure_memory(report: Report, num_pages: int) -> None:
    """Random pages of many workers, told in messages as at the start of a session; then looked up one by one."""
    caches = random_hashes(num_pages).reshape(WORKERS[-1], -1)
    index, before = PrefixIndex(), rss()
    took_s = min(timed(partial(store_pages, index, worker, hashes)) for worker, hashes in enumerate(caches))
    ours, before = (rss() - before) / num_pages, rss()
    sets = [set(hashes.tolist()) for hashes in caches]
    peers = {"sets": (rss() - before) / num_pages}
    report.row("prefix_index", f"{num_pages / 1e6:.1f} M pages, memory of each", ours, "B", peers=peers)
    report.row("prefix_index", "told at the start of a session", caches.shape[1] / took_s / 1e6, "M pages/s")
    measure_look_ups(report, index, caches, sets)
    measure_news(report, index, caches)


def measure_news(report: Report, index: PrefixIndex, caches: U64) -> None:
    """Small messages of each worker: pages of its own go, and as many of another's come."""
    times = []
    for worker, (gone, new) in enumerate(pairwise(caches[:, : 100 * STEP_PAGES // 2])):
        pages = zip(gone.reshape(100, -1), new.reshape(100, -1), strict=True)
        first = -(-caches.shape[1] // MAX_HASHES) + 1
        messages = [KvNews(number, removed=old, stored=fresh) for number, (old, fresh) in enumerate(pages, first)]
        times.append(timed(partial(apply_all, index, worker, messages)))
    report.row("prefix_index", f"told after a step, {STEP_PAGES} pages", min(times) / 100 * 1e6, "us")


def measure_look_ups(report: Report, index: PrefixIndex, caches: U64, sets: Sequence[set[int]]) -> None:
    """A prompt that nobody has costs 12 look-ups at each worker; nearly each misses the processor's caches."""
    memory, prompts = caches.reshape(-1), random_hashes(50 * (2**12 - 1)).reshape(50, -1)
    places = RNG.integers(0, memory.size, (50, 12 * len(sets)))
    ours_s = min(timed(partial(index.holders, {PAGE_SIZE: prompt})) for prompt in prompts)
    theirs_s = min(timed(partial(bisect_all, prompt.tolist(), sets)) for prompt in prompts)
    limit_s = min(timed(partial(memory.take, some)) for some in places)
    count, peers = places.shape[1] / 1e6, {"sets": places.shape[1] / theirs_s / 1e6}
    case = f"look-ups at {len(sets)} workers"
    report.row("prefix_index", case, count / ours_s, "M/s", count / limit_s, "random reads", limit_s / ours_s, peers)


def apply_all(index: PrefixIndex, worker: int, messages: Sequence[KvNews]) -> None:
    for message in messages:
        assert index.apply(worker, message)


def bisect_all(chain: Sequence[int], sets: Sequence[set[int]]) -> list[int]:
    return [bisect_left(chain, True, key=lambda page: page not in pages) for pages in sets]


def measure_prompts(report: Report, num_workers: int) -> None:
    """A long prompt, of which each worker has another part."""
    chain = page_hashes(RNG.integers(0, 150_000, PROMPT_LEN), PAGE_SIZE)
    index, sets = PrefixIndex(), []
    for worker in range(num_workers):
        pages = np.concatenate((chain[: RNG.integers(0, len(chain))], random_hashes(16_384)))
        store_pages(index, worker, pages)
        sets.append(set(pages.tolist()))
    listed = chain.tolist()
    took_s = best(lambda: index.holders({PAGE_SIZE: chain}))
    one_by_one_s = best(lambda: [leading(listed, pages) for pages in sets], rounds=3)
    bisecting_s = best(lambda: bisect_all(listed, sets))
    report.row(
        "prefix_index",
        f"a prompt of {PROMPT_LEN} tokens at {num_workers} workers",
        took_s * 1e6,
        "us",
        peers={"sets, page by page": one_by_one_s * 1e6, "sets, bisecting": bisecting_s * 1e6},
    )
    num_pages = len(chain) * num_workers
    report.row("prefix_index", "the same, counted in pages", num_pages / took_s / 1e6, "M pages/s")


def leading(chain: Sequence[int], pages: set[int]) -> int:
    return next((length for length, page in enumerate(chain) if page not in pages), len(chain))


def measure_guesses(report: Report) -> None:
    chain = page_hashes(RNG.integers(0, 150_000, PROMPT_LEN), PAGE_SIZE)
    index = ApproximateIndex(time.monotonic)
    for worker in range(8):
        index.note(worker, chain[: worker * 256])
    report.row("prefix_index", "guess: note a prompt", best(lambda: index.note(0, chain)) * 1e6, "us")
    report.row("prefix_index", "guess: look up at 8 workers", best(lambda: index.holders(chain)) * 1e6, "us")


def store_pages(index: PrefixIndex, worker: int, hashes: U64) -> None:
    for sequence, start in enumerate(range(0, len(hashes), MAX_HASHES), 1):
        assert index.apply(worker, KvNews(sequence, sequence == 1, stored=hashes[start : start + MAX_HASHES]))


def random_hashes(count: int) -> U64:
    return RNG.integers(1, 2**64, count, np.uint64)


def rss() -> int:
    gc.collect()
    resident: int = psutil.Process().memory_info().rss
    return resident


def timed(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def best(action: Callable[[], object], rounds: int = 20) -> float:
    """Seconds of the fastest round: the others were disturbed."""
    return min(timed(action) for _ in range(rounds))


def row_ms(
    report: Report, case: str, took_s: float, limit_s: float, limit_is: str, peers: dict[str, float] | None = None
) -> None:
    scaled = {name: 1e3 * peer_s for name, peer_s in (peers or {}).items()}
    report.row("prefix_index", case, 1e3 * took_s, "ms", 1e3 * limit_s, limit_is, limit_s / took_s, scaled)


if __name__ == "__main__":
    main()
