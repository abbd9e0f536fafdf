"""Caches over file tiers in a folder: what one life computes, another finds."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import I64
from diptych.engine.cache.beside import Beside
from diptych.engine.cache.cache_changes import CacheChanges
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.page_ids import PageId, chain_proofs, root_proof
from diptych.engine.cache.tier import Lookup, Restore, Tier
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.lasting_tier import LastingTier
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_format import PageFormat
from diptych.engine.tiers.page_objects import Objects, PageObjects
from diptych.engine.tiers.segments import SegmentFormat
from diptych.engine.tiers.shared_tier import SharedTier
from diptych.engine.tiers.stores.object_room import Room
from diptych.engine.tiers.stores.object_store import ObjectStore
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.page_hash import page_hashes, root_hash
from diptych.generation.sampling_params import SamplingParams

PAGE = 2
PAGE_NBYTES = 512
TERMS = b"terms of 16 byte"
RECORD = SegmentFormat(TERMS, PAGE_NBYTES)
MIB = 2**20
SOON_S = 60.0  # so long a thread of a busy machine may take

Bytes = npt.NDArray[np.uint8]


def page_ids(tokens: I64, extra_key: bytes = b"") -> list[PageId]:
    names = page_hashes(tokens, PAGE, extra_key).tolist()
    parents = [root_hash(extra_key), *names[:-1]][: len(names)]
    proofs = chain_proofs(root_proof(extra_key), tokens, PAGE)
    return [PageId(0, *each) for each in zip(names, parents, proofs, strict=True)]


def payload_of(page_id: PageId) -> Bytes:
    """Return what is in a page, which nothing else has."""
    return np.random.default_rng([page_id.group, *page_id.proof]).integers(0, 256, PAGE_NBYTES, np.uint8)


def new_cache(tiers: Sequence[Tier], **options: Any) -> KvCache:
    return KvCache(
        num_pages=200,
        page_size=PAGE,
        max_requests=4,
        max_tokens_per_request=300,
        tiers=tiers,
        changes=CacheChanges(),
        **options,
    )


class Life:
    """A process that has a pool, a cache and a file tier."""

    def __init__(
        self, folder: Path, disk: Disk | None = None, record: SegmentFormat = RECORD, mib: int = 1, **beside: Any
    ) -> None:
        self.pool = np.zeros((200, record.page_nbytes), np.uint8)
        self.files = PageFiles(folder, record, mib * MIB, self.pool, self.pool, disk)
        self.tier = FileTier(self.files)
        self.tiers: list[LastingTier] = [self.tier]
        self.cache = new_cache([self.tier], **beside)

    def compute(self, tokens: Sequence[int], num_uses: int = 2, extra_key: bytes = b"") -> Request:
        """Have the pages of a prompt in the cache, as if it had been asked for so often. Return the last request."""
        for _ in range(num_uses):
            one = self.ask(tokens, extra_key)
            for cut in one.cuts:
                self._compute(one, cut)
                self.cache.begin_snapshot(one, cut)
                for snapshot in one.snapshots:
                    self.pool[snapshot.pages] = self.beside(one, cut, len(snapshot.pages))
                self.cache.release_duplicates(self.cache.share(one, cut))
            self._compute(one, one.num_tokens)
            self.cache.retire(one)
        return one

    def request(self, tokens: Sequence[int], extra_key: bytes = b"") -> Request:
        return new_request(1, np.array(tokens, np.int64), SamplingParams(max_tokens=1), extra_key=extra_key)

    def evict_all(self) -> None:
        """Let everything go down, and wait until it is written or lost."""
        self.cache._evict(self.cache.num_available)
        self.tier.finish_writes()

    def ask(self, tokens: Sequence[int], extra_key: bytes = b"") -> Request:
        """Admit a request as a scheduler does, with what comes back."""
        one = self.request(tokens, extra_key)
        while not self.cache.admit(one):
            assert one.restore is not None
            self.wait_for(one.restore)
        return one

    def wait_for(self, reason: Restore | Lookup) -> None:
        while not reason.is_over(self.cache.tree.now_s):
            select.select([each for tier in self.tiers for each in tier.descriptors()], [], [], 0.1)
            for answer in [each for tier in self.tiers for each in tier.restored()]:
                self.cache.finish_restore(answer.number, answer.error)

    def expect_right(self, one: Request) -> None:
        """Every page that the request found has what was computed of it."""
        num_pages = one.cached_len // PAGE
        pages = self.cache.pages_of(one)[:num_pages]
        ids = page_ids(one.tokens[: num_pages * PAGE], one.extra_key)
        assert np.array_equal(self.pool[pages], self.filled([payload_of(page_id) for page_id in ids]))
        for group, windows in enumerate(self.cache.window_table[one.row].T):
            for number in range(one.first_window, num_pages):
                expected = payload_of(ids[number]._replace(group=1 + group))
                assert np.array_equal(self.pool[windows[number]], self.filled([expected])[0])
        if one.state_from is not None and len(one.state_from):
            assert np.array_equal(self.pool[one.state_from], self.beside(one, one.cached_len, len(one.state_from)))

    def beside(self, one: Request, end: int, num_parts: int) -> Bytes:
        last = page_ids(one.tokens[:end], one.extra_key)[-1]
        return self.filled([payload_of(last._replace(group=0x8000 + part)) for part in range(num_parts)])

    def filled(self, payloads: Sequence[Bytes]) -> Bytes:
        rows = np.zeros((len(payloads), self.pool.shape[1]), np.uint8)
        for row, payload in zip(rows, payloads, strict=True):
            row[:] = np.resize(payload, len(row))
        return rows

    def end(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _compute(self, one: Request, end: int) -> None:
        first, ids = one.computed_len // PAGE, page_ids(one.tokens[: end // PAGE * PAGE], one.extra_key)
        pages = self.cache.pages_of(one)[first : len(ids)]
        if len(pages):
            self.pool[pages] = self.filled([payload_of(page_id) for page_id in ids[first:]])
        for group, windows in enumerate(self.cache.window_table[one.row].T):
            for number in range(first, len(ids)):
                self.pool[windows[number]] = self.filled([payload_of(ids[number]._replace(group=1 + group))])
        one.computed_len = end


RUN = 4  # pages


class SharedLife(Life):
    """A process that has a pool, a cache and a store that others use too; `files` makes files above it."""

    def __init__(
        self,
        store: ObjectStore,
        files: Callable[[Bytes], FileTier] | None = None,
        terms: bytes = TERMS,
        room: Room | None = None,
        clock: Callable[[], float] = time.monotonic,
        windows: WindowPages = NO_WINDOWS,
        pages_per_state: int = 0,
    ) -> None:
        self.pool = np.zeros((200, PAGE_NBYTES), np.uint8)
        beside = Beside(windows, pages_per_state, PAGE)
        objects = Objects(PageFormat(terms, PAGE_NBYTES), RUN, terms.hex(), beside)
        self.objects = PageObjects(store, objects, self.pool, room, clock)
        self.shared = SharedTier(self.objects)
        above = [] if files is None else [files(self.pool)]
        self.tiers = [*above, self.shared]
        self.cache = new_cache(above, store=self.shared, windows=windows, pages_per_state=pages_per_state)

    @property
    def reader_is_closed(self) -> bool:
        """Whether the breaker of reads is."""
        return self.objects.reader.breaker.is_closed

    def evict_all(self) -> None:
        self.cache._evict(self.cache.num_available)
        for tier in self.tiers:
            tier.finish_writes()

    def evict_pool(self) -> None:
        """Let everything go from the pool, and hear what threads have found out."""
        self.cache._evict(self.cache.num_available)
        self.shared.restored()

    def finish_writes(self) -> None:
        self.shared.finish_writes()
        assert self.shared.restored() == ()
