"""The KV pool of all ranks, as rank 0's scheduler sees it."""

from __future__ import annotations

import numpy as np
import xxhash

from diptych.engine.tensor_parallel.log_codec import to_bytes
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import PageIndices, Pool
from diptych.v1 import rank_pb2


class TensorParallelPool:
    """Implements `Pool`: rank 0's part of the memory, and the digest of all parts."""

    def __init__(self, pool: Pool, log: RankLog) -> None:
        self._pool = pool
        self._log = log

    @property
    def layout(self) -> PoolLayout:
        return self._pool.layout

    @property
    def buffer(self) -> memoryview:
        return self._pool.buffer

    @property
    def probe_pages(self) -> PageIndices:
        return self._pool.probe_pages

    def fill_probe(self, seed: int) -> None:
        """Every rank fills its own, before anything that comes later."""
        self._log.append(rank_pb2.RankEntry(fill_probe=seed))
        self._pool.fill_probe(seed)

    def digest(self, pages: PageIndices) -> int:
        """Return the hash of every rank's digest. The ranks compute at the same time."""
        question = rank_pb2.DigestPages(pages=to_bytes(np.asarray(pages, np.int64)))
        self._log.append(rank_pb2.RankEntry(digest=question))
        digests = [self._pool.digest(pages), *(answer.digest for answer in self._log.answers())]
        return xxhash.xxh3_64_intdigest(np.array(digests, "<u8").tobytes())
