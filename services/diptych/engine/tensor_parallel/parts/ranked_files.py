"""Pages in files, of which each rank has its part: a log of segments of its own, under one number.

A page is there if every rank has its part: see `ranked_loads`. All ranks are given the same pages in the same order, so
that they rarely differ: where one dropped a write, or was killed a little sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tensor_parallel.parts.ranked_part import RankedPart, RankPart
from diptych.engine.tensor_parallel.rank_log import RankLog, from_bytes, ids_from_bytes, ids_to_bytes, page_bytes
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages
from diptych.v1 import rank_pb2


class RankedFiles(RankedPart[PageFiles]):
    """Implements `Medium` on rank 0, over its own part and those of the others."""

    def __init__(self, own: PageFiles, log: RankLog) -> None:
        super().__init__(own, log)
        log.append(rank_pb2.RankEntry(open_files=own.log.number))

    def keep(self, places: I32, ids: Sequence[PageId]) -> list[bool]:
        keep = rank_pb2.KeepPages(places=page_bytes(places), ids=ids_to_bytes(ids))
        self._log.append(rank_pb2.RankEntry(keep=keep))
        self._to_copy = True
        return self._own.keep(places, ids)

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


class RankFiles(RankPart[PageFiles]):
    """Implements `RankMedium`: what another rank does with its part of files, as rank 0 says."""

    def apply(self, entry: rank_pb2.RankEntry) -> bool:
        match entry.WhichOneof("entry"):
            case "keep":
                self._own.keep(from_bytes(entry.keep.places).astype(np.int32), ids_from_bytes(entry.keep.ids))
            case "load":
                ids = ids_from_bytes(entry.load.ids)
                self._loads.begin(entry.load.number, ids)
                self._own.load(entry.load.number, ids, from_bytes(entry.load.pages).astype(np.int32))
            case "forget_pages":
                self._own.forget(ids_from_bytes(entry.forget_pages))
            case _:
                return False
        return True

    def ended(self) -> Sequence[rank_pb2.LoadEnd]:
        return self._loads.ended()
