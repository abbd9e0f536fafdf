"""Caches over file tiers in a folder: what one life computes, another finds."""

from __future__ import annotations

import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import I64
from diptych.engine.cache.cache_changes import CacheChanges
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.page_ids import PageId, chain_proofs, root_proof
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.segments import SegmentFormat
from diptych.engine.values.request import Request, new_request
from diptych.generation.page_hash import page_hashes, root_hash
from diptych.generation.sampling_params import SamplingParams

PAGE = 2
PAGE_NBYTES = 512
TERMS = b"terms of 16 byte"
RECORD = SegmentFormat(TERMS, PAGE_NBYTES)
MIB = 2**20
SOON_S = 20.0  # so long a thread of a busy machine may take

Bytes = npt.NDArray[np.uint8]


def page_ids(tokens: I64, extra_key: bytes = b"") -> list[PageId]:
    names = page_hashes(tokens, PAGE, extra_key).tolist()
    parents = [root_hash(extra_key), *names[:-1]][: len(names)]
    proofs = chain_proofs(root_proof(extra_key), tokens, PAGE)
    return [PageId(0, *each) for each in zip(names, parents, proofs, strict=True)]


def payload_of(page_id: PageId) -> Bytes:
    """Return what is in a page, which nothing else has."""
    return np.random.default_rng([page_id.group, *page_id.proof]).integers(0, 256, PAGE_NBYTES, np.uint8)


class Life:
    """A process that has a pool, a cache and a file tier."""

    def __init__(
        self, folder: Path, disk: Disk | None = None, record: SegmentFormat = RECORD, mib: int = 1, **beside: Any
    ) -> None:
        self.pool = np.zeros((200, record.page_nbytes), np.uint8)
        self.files = PageFiles(folder, record, mib * MIB, self.pool, self.pool, disk)
        self.tier = FileTier(self.files)
        self.cache = KvCache(
            num_pages=200,
            page_size=PAGE,
            max_requests=4,
            max_tokens_per_request=300,
            tiers=[self.tier],
            changes=CacheChanges(),
            **beside,
        )

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
            self.wait_for_answers()
        return one

    def wait_for_answers(self) -> None:
        while not (answers := self.tier.restored()):
            select.select(self.tier.descriptors(), [], [], 0.1)
        for answer in answers:
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
        self.tier.close()

    def _compute(self, one: Request, end: int) -> None:
        first, ids = one.computed_len // PAGE, page_ids(one.tokens[: end // PAGE * PAGE], one.extra_key)
        pages = self.cache.pages_of(one)[first : len(ids)]
        if len(pages):
            self.pool[pages] = self.filled([payload_of(page_id) for page_id in ids[first:]])
        for group, windows in enumerate(self.cache.window_table[one.row].T):
            for number in range(first, len(ids)):
                self.pool[windows[number]] = self.filled([payload_of(ids[number]._replace(group=1 + group))])
        one.computed_len = end
