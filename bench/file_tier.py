"""Speed of the file tier of the prefix cache: pages to files and back, a restart with 100 GB, and slow devices.

    python bench/file_tier.py [--folder DIR] [--quick] [--json]

`write` and `read` are as a scheduler sees them, digests included: from the first page given to the last on the medium,
and from asking to the last page in the pool. Limits, in turns in the same run: the same bytes to the device by writes
as large, past the page cache; from the device by reads as large into one buffer; and, for what is in the page cache,
reads of one page each straight into the pool, which is a memcpy.

A tier lives for all rounds, so that its buffers are there from the second on. Beside each speed stands what a gigabyte
takes of a processor, in all threads, which says more than the clock where others use the machine.

`shared` is the same through a store in a directory on the device: runs of pages as objects, read by eight threads; and
the time to the first token of prompts that another worker has given to it, with what asking costs, against computing
them at 20,000 tokens a second, and what asking costs those that nobody has.

`restart` opens a log of 100 GB, whose segments are sparse files with footers, without reading a page.

`sweep` is the worst case: prompts that are all in files are asked for at each speed of a device that a sleep stands in
for, beside a model that computes 20,000 tokens a second. `value` is the time with the tier against that without.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from report import Report, arguments

from diptych.common.arrays import I32
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.page_ids import TOKENS, PageId
from diptych.engine.tiers import page_objects
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.lasting_tier import LastingTier
from diptych.engine.tiers.page_files import BUFFER_NBYTES, NUM_BUFFERS, PageFiles
from diptych.engine.tiers.page_format import HEADER_NBYTES, PageFormat
from diptych.engine.tiers.page_objects import Objects, PageObjects
from diptych.engine.tiers.record_bytes import Landing
from diptych.engine.tiers.runs import run_pages
from diptych.engine.tiers.segment_log import SegmentLog
from diptych.engine.tiers.segments import BLOCK, MAX_SEGMENT_NBYTES, SegmentFormat, Table
from diptych.engine.tiers.shared_tier import SharedTier
from diptych.engine.tiers.stores.directory_store import open_directory
from diptych.engine.tiers.stores.object_room import Room
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

MIB: Final = 2**20
PAGE_KIB: Final = (64, 1024, 8192)
TERMS: Final = b"of a benchmark.."
RESTART_GB: Final = 100
PAGE_SIZE: Final = 16
PROMPT_TOKENS: Final = 2048
TOKENS_PER_S: Final = 20_000.0  # that the model of the sweep computes
SWEEP_MB_PER_S: Final = (5, 20, 80, 320, 1280)
ROUNDS: Final = 7  # in turns; the best counts
SWEEP_PAGE: Final = 64 * 1024


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", default=".", help="on the device that is measured")
    parser.add_argument("--memory", default="/dev/shm", help="a folder in memory, for devices that are slowed down")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="file_tier.", dir=options.folder))
    try:
        with Report(as_json=options.json) as report:
            for page_kib in PAGE_KIB:
                measure_pages(report, folder / f"{page_kib}", page_kib * 1024, 64 if options.quick else 256)
            for page_kib in PAGE_KIB:
                measure_objects(report, folder / f"objects.{page_kib}", page_kib * 1024, 64 if options.quick else 256)
            measure_first_token(report, folder / "first", 4 if options.quick else 16)
            measure_restart(report, folder / "restart", 20 if options.quick else RESTART_GB)
            with tempfile.TemporaryDirectory(dir=options.memory) as in_memory:
                for mb_per_s in SWEEP_MB_PER_S:
                    measure_slow(report, Path(in_memory) / f"{mb_per_s}", mb_per_s, 4 if options.quick else 16)
    finally:
        shutil.rmtree(folder)


def file_tier(folder: Path, page_nbytes: int, capacity_nbytes: int, pool: Any, disk: Disk | None = None) -> FileTier:
    return FileTier(PageFiles(folder, SegmentFormat(TERMS, page_nbytes), capacity_nbytes, pool, pool, disk))


def ids_of(num_pages: int, text: int = 0) -> list[PageId]:
    """Return the ids of a text that nobody else has."""
    return [PageId(0, name, 0, name.to_bytes(16, "little")) for name in range(text << 32, (text << 32) + num_pages)]


class Turns:
    """What takes turns in one run: seconds of each round, and those of a processor in all threads."""

    def __init__(self) -> None:
        self._took_s: dict[str, list[float]] = {}
        self._cpu_s: dict[str, list[float]] = {}

    def take(self, name: str, work: Callable[[], object]) -> None:
        began_s = time.process_time()
        self._took_s.setdefault(name, []).append(timed(work))
        self._cpu_s.setdefault(name, []).append(time.process_time() - began_s)

    def report(self, report: Report, case: str, name: str, mib: int, limit: str, limit_is: str) -> None:
        """The best of all rounds counts: of the speed, and of what it costs."""
        gigabytes, took_s, limit_s = mib * MIB / 1e9, min(self._took_s[name]), min(self._took_s[limit])
        cpu = {
            "ms of a processor/GB": 1e3 * min(self._cpu_s[name]) / gigabytes,
            "those of the limit": 1e3 * min(self._cpu_s[limit]) / gigabytes,
        }
        report.row(
            "file_tier", case, gigabytes / took_s, "GB/s", gigabytes / limit_s, limit_is, limit_s / took_s, peers=cpu
        )


def measure_pages(report: Report, folder: Path, page_nbytes: int, mib: int) -> None:
    """Pages of one size, to files and back: from the device, then from the page cache."""
    num_pages = mib * MIB // page_nbytes
    pool = np.random.default_rng(0).integers(0, 256, (num_pages, page_nbytes), np.uint8)
    before, slots = pool.copy(), np.arange(num_pages, dtype=np.int32)
    one, file, turns = np.zeros((1, max(MIB, page_nbytes)), np.uint8), folder / "raw", Turns()
    tier = file_tier(folder / "log", page_nbytes, 2 * ROUNDS * mib * MIB, pool)
    for number in range(ROUNDS):
        ids = ids_of(num_pages, number)
        turns.take("write", partial(write_all, tier, ids, page_nbytes + HEADER_NBYTES))
        assert tier.counts.num_pages == (number + 1) * num_pages
        turns.take("raw write", partial(raw_write, file, before))
        pool[:] = 0
        drop_cached(folder)
        found = tier.claim(ids)
        turns.take("read", partial(read_all, tier, found, slots))
        assert np.array_equal(pool, before)
        pool[:] = 0
        turns.take("cached", partial(read_all, tier, found, slots))
        assert np.array_equal(pool, before)
        drop_cached(folder)
        turns.take("raw read", partial(raw_read, file, one, before.nbytes))
        turns.take("memcpy", partial(raw_read, file, pool, before.nbytes))
        tier.release(found)
    tier.close()
    case = f"{page_nbytes // 1024}KiB"
    turns.report(report, f"write/{case}", "write", mib, "raw write", "device, same run")
    turns.report(report, f"read/device/{case}", "read", mib, "raw read", "device, same run")
    turns.report(report, f"read/page cache/{case}", "cached", mib, "memcpy", "memcpy from the page cache")


def write_all(tier: FileTier, ids: Sequence[PageId], record_nbytes: int) -> None:
    """Give all pages, as many at once as find a place."""
    step = (NUM_BUFFERS - 1) * max(1, BUFFER_NBYTES // record_nbytes)
    slots = tier.allocate(len(ids))
    for start in range(0, len(ids), step):
        places = np.arange(start, min(start + step, len(ids)), dtype=np.int32)
        tier.save(places, slots[places], ids[start : start + step])
        tier.finish_writes()
    tier.release(slots)


def read_all(tier: LastingTier, slots: I32, pages: I32) -> None:
    tier.restore(0, slots, pages)
    while not (answers := tier.restored()):
        select.select(tier.descriptors(), [], [], 0.5)
    assert answers[0].error is None, answers


def raw_write(path: Path, data: Any) -> None:
    disk, flat = Disk(), data.reshape(-1)
    descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    aligned = aligned_buffer(8 * MIB)
    for start in range(0, len(flat), 8 * MIB):
        piece = flat[start : start + 8 * MIB]
        aligned[: len(piece)] = piece
        disk.write(descriptor, memoryview(aligned[: len(piece)]), start)
    os.close(descriptor)


def raw_read(path: Path, rows: Any, nbytes: int) -> None:
    """Read a file row by row into `rows`, over and over."""
    descriptor = os.open(path, os.O_RDONLY)
    at = 0
    while at < nbytes:
        at += os.preadv(descriptor, [rows[at // rows.shape[1] % len(rows)]], at)
    os.close(descriptor)


def aligned_buffer(nbytes: int) -> Any:
    raw = np.zeros(nbytes + BLOCK, np.uint8)
    start = -raw.ctypes.data % BLOCK
    return raw[start : start + nbytes]


def drop_cached(folder: Path) -> None:
    """Have the system forget what is in files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure_restart(report: Report, folder: Path, num_gb: int) -> None:
    """Open a log whose pages nobody reads."""
    record = SegmentFormat(TERMS, 64 * 1024)
    capacity = num_gb * 10**9
    first = SegmentLog(folder, record, capacity, Disk())
    first.close()
    per_segment = MAX_SEGMENT_NBYTES // record.record_nbytes - 1
    rng, num_segments = np.random.default_rng(0), capacity // MAX_SEGMENT_NBYTES
    for number in range(1, num_segments + 1):
        keys = rng.integers(0, 256, (per_segment, 18), np.uint8)
        offsets = (np.arange(per_segment) * record.record_nbytes).tolist()
        end = -(-per_segment * record.record_nbytes // BLOCK) * BLOCK
        with open(first.folder / f"{number:08d}.segment", "wb") as file:
            file.truncate(end)
            file.seek(end)
            file.write(record.footer(end, Table([row.tobytes() for row in keys], offsets)))
    opened: list[SegmentLog] = []
    began_s = time.process_time()
    took_s = timed(lambda: opened.append(SegmentLog(folder, record, capacity, Disk())))
    cpu_s, num_pages = time.process_time() - began_s, opened[0].index.num_pages
    case = f"restart/{num_gb}GB, {num_pages:,} pages"
    report.row("file_tier", case, took_s, "s", 2.0 * num_gb / RESTART_GB, "target", None, {"of a processor": cpu_s})
    opened[0].close()


def shared_tier(folder: Path, page_nbytes: int, pool: Any) -> SharedTier:
    """Return the tier of a store in a folder; its medium is measured."""
    store, record = open_directory("file:", str(folder.resolve())), PageFormat(TERMS, page_nbytes)
    objects = Objects(record, run_pages(PAGE_SIZE, record.record_nbytes), TERMS.hex())
    tier = SharedTier(PageObjects(store, objects, pool, Room(store, 2**40)))
    while tier.look_up_s == math.inf:
        select.select(tier.descriptors(), [], [], 0.001)
    return tier


def measure_objects(report: Report, folder: Path, page_nbytes: int, mib: int) -> None:
    """Pages of one size, to objects and back, from the device and from the page cache."""
    num_pages = mib * MIB // page_nbytes
    pool = np.random.default_rng(0).integers(0, 256, (num_pages, page_nbytes), np.uint8)
    before, slots = pool.copy(), np.arange(num_pages, dtype=np.int32)
    one, file, turns = np.zeros((1, 8 * MIB), np.uint8), folder / "raw", Turns()
    tier = shared_tier(folder / "store", page_nbytes, pool)
    for number in range(ROUNDS):
        ids = ids_of(num_pages, number)
        turns.take("write", partial(offer_all, tier, ids))
        assert tier.counts.written.num_pages == (number + 1) * num_pages, tier.counts
        turns.take("raw write", partial(raw_write_files, folder / "raw files", before, tier.run_pages))
        raw_write(file, before)
        pool[:] = 0
        drop_cached(folder)
        found = tier.claim(ids)
        turns.take("read", partial(read_all, tier, found, slots))
        assert np.array_equal(pool, before)
        pool[:] = 0
        turns.take("cached", partial(read_all, tier, found, slots))
        assert np.array_equal(pool, before)
        drop_cached(folder)
        turns.take("raw read", partial(raw_read, file, one, before.nbytes))
        turns.take("memcpy", partial(raw_read, file, pool, before.nbytes))
        raw_read_files(folder / "raw files", pool, tier.run_pages)
        turns.take("memcpy files", partial(raw_read_files, folder / "raw files", pool, tier.run_pages))
        tier.release(found)
    tier.close()
    case = f"{page_nbytes // 1024}KiB"
    turns.report(report, f"shared/write/{case}", "write", mib, "raw write", "files as large")
    turns.report(report, f"shared/read/device/{case}", "read", mib, "raw read", "device, same run")
    turns.report(report, f"shared/read/page cache/{case}", "cached", mib, "memcpy", "memcpy from the page cache")
    turns.report(report, f"shared/read/page cache/{case}", "cached", mib, "memcpy files", "the same, files as large")


def raw_write_files(folder: Path, rows: Any, rows_per_file: int) -> None:
    """Write rows to new files, by way of the page cache, each of which gets its name when it is whole."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for start in range(0, len(rows), rows_per_file):
        with open(folder / "new", "wb", buffering=0) as file:
            file.write(rows[start : start + rows_per_file])
        (folder / "new").rename(folder / f"{start}")


def raw_read_files(folder: Path, rows: Any, rows_per_file: int) -> None:
    for start in range(0, len(rows), rows_per_file):
        with open(folder / f"{start}", "rb", buffering=0) as file:
            os.preadv(file.fileno(), [rows[start : start + rows_per_file]], 0)


def offer_all(tier: SharedTier, ids: Sequence[PageId]) -> None:
    """Give all pages, as many runs at once as find a place."""
    pages, size = np.arange(len(ids), dtype=np.int32), tier.run_pages
    todo = [slice(start, start + size) for start in range(0, len(ids), size)]
    while todo:
        for part in todo[: page_objects.NUM_BUFFERS]:
            tier.offer(pages[part], ids[part])
        tier.finish_writes()
        todo = [part for part in todo if tier.lacks(TOKENS, ids[part][-1].name)]
    tier.restored()


def measure_first_token(report: Report, folder: Path, num_prompts: int) -> None:
    """Prompts that another worker has given to the store, and prompts that nobody has: with it against without."""
    prompts = [
        np.random.default_rng(number).integers(0, 50_000, PROMPT_TOKENS + 1) for number in range(2 * num_prompts)
    ]
    pool = np.zeros((2 * PROMPT_TOKENS // PAGE_SIZE, SWEEP_PAGE), np.uint8)
    filling = shared_tier(folder, SWEEP_PAGE, pool)
    cache = new_cache(pool, None, filling)
    for prompt in prompts[:num_prompts]:
        serve(cache, filling, prompt, 0.0)
        filling.finish_writes()
    filling.close()
    asking = shared_tier(folder, SWEEP_PAGE, pool)
    cache, alone = new_cache(pool, None, asking), new_cache(pool, None)
    cache.compute_s = lambda start, end: (end - start) / TOKENS_PER_S
    for what, some in (("given by another", prompts[:num_prompts]), ("unknown to all", prompts[num_prompts:])):
        with_s, without_s = [], []
        for prompt in some:
            with_s.append(timed(partial(serve, cache, asking, prompt, 1 / TOKENS_PER_S)))
            without_s.append(timed(partial(serve, alone, None, prompt, 1 / TOKENS_PER_S)))
        ms, limit_ms = 1e3 * float(np.median(with_s)), 1e3 * float(np.median(without_s))
        case = f"shared/first token/{PROMPT_TOKENS} tokens {what}"
        report.row("file_tier", case, ms, "ms", limit_ms, "computed, same run", limit_ms / ms)
    asking.close()


class SlowDisk(Disk):
    """A device that gives so many bytes a second, and has nothing cached."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when the device has done what it was asked for

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        num_read = super().read(descriptor, buffers, offset)
        self._free_s = max(self._free_s, time.monotonic()) + num_read / self._bytes_per_s
        time.sleep(max(0.0, self._free_s - time.monotonic()))
        return num_read

    def read_cached(self, descriptor: int, landing: Landing, offset: int) -> None:
        pass


def measure_slow(report: Report, folder: Path, mb_per_s: int, num_prompts: int) -> None:
    """Prompts that are all in files, on a device of some speed: with the tier against without."""
    prompts = [np.random.default_rng(number).integers(0, 50_000, PROMPT_TOKENS + 1) for number in range(num_prompts)]
    pool = np.zeros((2 * PROMPT_TOKENS // PAGE_SIZE, SWEEP_PAGE), np.uint8)
    capacity = 2 * num_prompts * PROMPT_TOKENS // PAGE_SIZE * SWEEP_PAGE
    filling = file_tier(folder, SWEEP_PAGE, capacity, pool)
    cache = new_cache(pool, filling)
    for prompt in prompts:
        serve(cache, filling, prompt, 0.0)
        cache._evict(cache.num_available)
        filling.finish_writes()
    filling.close()
    slow = file_tier(folder, SWEEP_PAGE, capacity, pool, SlowDisk(mb_per_s * 1e6))
    cache = new_cache(pool, slow)
    cache.compute_s = lambda start, end: (end - start) / TOKENS_PER_S
    alone = new_cache(pool, None)
    with_s = without_s = 0.0
    for prompt in prompts:
        with_s += timed(partial(serve, cache, slow, prompt, 1 / TOKENS_PER_S))
        without_s += timed(partial(serve, alone, None, prompt, 1 / TOKENS_PER_S))
    loaded = slow.counts.read.num_pages / (num_prompts * PROMPT_TOKENS // PAGE_SIZE)
    case = f"sweep/{mb_per_s} MB/s, {loaded:.0%} loaded"
    report.row("file_tier", case, with_s / without_s, "of the time without", 1.03, "target")
    slow.close()


def new_cache(pool: Any, tier: FileTier | None, store: SharedTier | None = None) -> KvCache:
    return KvCache(
        num_pages=len(pool),
        page_size=PAGE_SIZE,
        max_requests=1,
        max_tokens_per_request=2 * PROMPT_TOKENS,
        tiers=[] if tier is None else [tier],
        store=store,
    )


def serve(cache: KvCache, tier: LastingTier | None, prompt: Any, token_s: float) -> None:
    """Load what is to be loaded, and take the time that the rest of a prompt is computed in."""
    cache.tree.at(time.monotonic())
    request: Request = new_request(1, prompt.astype(np.int64), SamplingParams(max_tokens=1))
    while not cache.admit(request):
        assert tier is not None
        assert request.restore is not None
        while not request.restore.is_over(time.monotonic()):
            select.select(tier.descriptors(), [], [], 0.001)
            for answer in tier.restored():
                cache.finish_restore(answer.number, answer.error)
        cache.tree.at(time.monotonic())
    time.sleep((request.num_tokens - request.cached_len) * token_s)
    request.computed_len = request.num_tokens
    cache.retire(request)


if __name__ == "__main__":
    main()
