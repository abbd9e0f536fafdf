"""The pages that links are tested with, of all ranks."""

from __future__ import annotations

from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import PageIndices, ProbePages
from diptych.v1 import rank_pb2


class TensorParallelPages:
    """Implements `ProbePages` on rank 0: every rank has them at the same place."""

    def __init__(self, pages: ProbePages, log: RankLog) -> None:
        self._pages = pages
        self._log = log

    @property
    def layout(self) -> PoolLayout:
        return self._pages.layout

    @property
    def probe_pages(self) -> PageIndices:
        return self._pages.probe_pages

    @property
    def pattern_pages(self) -> PageIndices:
        return self._pages.pattern_pages

    def fill_pattern(self, seed: int) -> None:
        """Every rank fills its own, before anything that comes later."""
        self._log.append(rank_pb2.RankEntry(fill_probe=seed))
        self._pages.fill_pattern(seed)
