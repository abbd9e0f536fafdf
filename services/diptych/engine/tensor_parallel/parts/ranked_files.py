"""Pages in files, of which each rank has its part: a log of segments of its own, under one number.

A page is there if every rank has its part: see `ranked_loads`. All ranks are given the same pages in the same order, so
that they rarely differ: where one dropped a write, or was killed a little sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tensor_parallel.parts.ranked_loads import RankedLoads, RankLoads
from diptych.engine.tensor_parallel.rank_log import RankLog, from_bytes, ids_from_bytes, ids_to_bytes, page_bytes
from diptych.engine.tiers.medium import MediumCounts
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages
from diptych.v1 import rank_pb2


class RankedFiles:
    """Implements `Medium` on rank 0, over its own part and those of the others."""

    def __init__(self, own: PageFiles, log: RankLog) -> None:
        self._own = own
        self._log = log
        self._loads = RankedLoads(own, log.size)
        self._has_kept = False  # since `finish_copies`
        self.capacity = own.capacity
        log.append(rank_pb2.RankEntry(open_files=own.log.number))

    @property
    def counts(self) -> MediumCounts:
        """Return the counts of rank 0; pages that are not what was written are counted on all ranks."""
        return self._own.counts

    @property
    def num_pages(self) -> int:
        return self._own.num_pages

    @property
    def is_asked(self) -> bool:
        return self._own.is_asked

    def has(self, page_id: PageId) -> bool:
        return self._own.has(page_id)

    def lose(self, page_id: PageId) -> None:
        self._own.lose(page_id)

    def load_s(self, num_pages: int) -> float:
        return self._own.load_s(num_pages)

    def keep(self, places: I32, ids: Sequence[PageId]) -> list[bool]:
        keep = rank_pb2.KeepPages(places=page_bytes(places), ids=ids_to_bytes(ids))
        self._log.append(rank_pb2.RankEntry(keep=keep))
        self._has_kept = True
        return self._own.keep(places, ids)

    def finish_copies(self) -> None:
        """Return when every rank has applied the log so far, and so has copied what was to be kept."""
        if self._has_kept:
            self._log.ask(rank_pb2.RankEntry(finish_saves=True))
            self._has_kept = False

    def forget(self, ids: Sequence[PageId]) -> None:
        self._log.append(rank_pb2.RankEntry(forget_pages=ids_to_bytes(ids)))
        self._own.forget(ids)

    def load(self, number: int, ids: Sequence[PageId], pages: Pages) -> None:
        self._loads.begin(number, ids)
        load = rank_pb2.LoadPages(number=number, ids=ids_to_bytes(ids), pages=page_bytes(pages))
        self._log.append(rank_pb2.RankEntry(load=load))
        self._own.load(number, ids, pages)

    def restored(self) -> Sequence[PagesRestored]:
        """Return which loads have ended on every rank since the last call."""
        return self._loads.ended(self._log.loaded())

    def descriptors(self) -> Sequence[int]:
        return (*self._own.descriptors(), *self._log.restore_descriptors())

    def close(self) -> None:
        self._own.close()

    def finish_writes(self) -> None:
        self._own.finish_writes()


class RankFiles:
    """Implements `RankMedium`: what another rank does with its part of files, as rank 0 says."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        self._loads = RankLoads(files)

    @property
    def wait_ms(self) -> int | None:
        return self._loads.wait_ms

    def apply(self, entry: rank_pb2.RankEntry) -> bool:
        match entry.WhichOneof("entry"):
            case "keep":
                self._files.keep(from_bytes(entry.keep.places).astype(np.int32), ids_from_bytes(entry.keep.ids))
            case "load":
                ids = ids_from_bytes(entry.load.ids)
                self._loads.begin(entry.load.number, ids)
                self._files.load(entry.load.number, ids, from_bytes(entry.load.pages).astype(np.int32))
            case "forget_pages":
                self._files.forget(ids_from_bytes(entry.forget_pages))
            case _:
                return False
        return True

    def ended(self) -> Sequence[rank_pb2.LoadEnd]:
        return self._loads.ended()

    def descriptors(self) -> Sequence[int]:
        return self._files.descriptors()

    def close(self) -> None:
        self._files.close()
