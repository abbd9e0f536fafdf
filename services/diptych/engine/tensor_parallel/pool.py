"""The KV pool of all ranks, as rank 0's scheduler sees it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import DevicePages, PageIndices, Pool
from diptych.v1 import rank_pb2

P = TypeVar("P", bound=Pool | DevicePages)


class _Pages(Generic[P]):
    """What a pool has wherever its memory is."""

    def __init__(self, pool: P, log: RankLog) -> None:
        self._pool = pool
        self._log = log

    @property
    def layout(self) -> PoolLayout:
        return self._pool.layout

    @property
    def probe_pages(self) -> PageIndices:
        return self._pool.probe_pages

    @property
    def pattern_pages(self) -> PageIndices:
        return self._pool.pattern_pages

    def fill_pattern(self, seed: int) -> None:
        """Every rank fills its own, before anything that comes later."""
        self._log.append(rank_pb2.RankEntry(fill_probe=seed))
        self._pool.fill_pattern(seed)


class TensorParallelPool(_Pages[Pool]):
    """Implements `Pool`: rank 0's part of the memory."""

    @property
    def buffer(self) -> memoryview:
        return self._pool.buffer


class TensorParallelDevicePool(_Pages[DevicePages]):
    """Implements `DevicePages`: rank 0's part of the memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._pool.__cuda_array_interface__
