"""The host tier's memory beside a pool in host memory: pages are copied by memcpy, a run of neighbours at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import I32, I64
from diptych.engine.cache.tier import Slots
from diptych.kvtransfer.ownership import Pages

Bytes = npt.NDArray[np.uint8]


class HostPages:
    """Implements `PageCopier` between a KV pool and memory of its own, which the system provides as it is used.

    Every copy is done on return.
    """

    def __init__(self, pool: memoryview, page_nbytes: int, num_slots: int) -> None:
        num_pages = len(pool) // page_nbytes
        self._pool: Bytes = np.frombuffer(pool, np.uint8, num_pages * page_nbytes).reshape(num_pages, page_nbytes)
        self.slots: Bytes = np.empty((num_slots, page_nbytes), np.uint8)

    def save(self, pages: Pages, slots: Slots) -> None:
        for page, slot, length in runs(pages, slots):
            self.slots[slot : slot + length] = self._pool[page : page + length]

    def finish_saves(self) -> None:
        pass

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        for page, slot, length in runs(pages, slots):
            self._pool[page : page + length] = self.slots[slot : slot + length]
        return True

    def restored(self) -> Sequence[int]:
        return ()

    def descriptors(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass


def runs(pages: I32 | I64, slots: I32 | I64) -> Iterator[tuple[int, int, int]]:
    """Yield (first page, first slot, length) of each run in which both lists count up by one."""
    return zip(*(each.tolist() for each in run_arrays(pages, slots)), strict=True)


def run_arrays(pages: I32 | I64, slots: I32 | I64) -> tuple[I64, I64, I64]:
    """Return the first page, the first slot and the length of each run: int64 `[num_runs]`."""
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(slots) != 1)) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    lengths = np.diff(starts, append=len(pages))
    return pages[starts].astype(np.int64), slots[starts].astype(np.int64), lengths
