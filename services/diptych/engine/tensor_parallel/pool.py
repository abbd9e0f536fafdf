"""The KV pool of all ranks, as rank 0's scheduler sees it."""

from __future__ import annotations

from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import PageIndices, Pool
from diptych.v1 import rank_pb2


class TensorParallelPool:
    """Implements `Pool`: rank 0's part of the memory."""

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
