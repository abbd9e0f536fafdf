"""Pages in a store, of which each rank has its part: in objects of its own, whose names have the same endings.

Rank 0 alone asks what is there, and an object is there if those of all ranks are: so it believes no write before it has
asked. A load says which objects it reads; what any rank finds wrong or gone, rank 0 forgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import Lookup
from diptych.engine.tensor_parallel.parts.ranked_part import RankedPart, RankPart
from diptych.engine.tensor_parallel.rank_log import RankLog, from_bytes, ids_from_bytes, ids_to_bytes, page_bytes
from diptych.engine.tiers.object_asker import AskCounts
from diptych.engine.tiers.page_objects import PageObjects
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages
from diptych.v1 import rank_pb2


class RankedObjects(RankedPart[PageObjects]):
    """Implements `RunMedium` on rank 0, over its own part and those of the others."""

    def __init__(self, own: PageObjects, log: RankLog) -> None:
        super().__init__(own, log)
        opened = rank_pb2.OpenStore(terms=own.objects.record.terms, run_pages=own.objects.run_pages)
        log.append(rank_pb2.RankEntry(open_store=opened))

    @property
    def run_pages(self) -> int:
        return self._own.run_pages

    @property
    def asked(self) -> AskCounts:
        return self._own.asked

    @property
    def look_up_s(self) -> float:
        return self._own.look_up_s

    @property
    def takes_pages(self) -> bool:
        return self._own.takes_pages

    def look_up(
        self, first: int, ids: Sequence[PageId], until_s: float, before: Sequence[PageId] = ()
    ) -> Lookup | None:
        return self._own.look_up(first, ids, until_s, before)

    def lacks(self, group: int, name: int) -> bool:
        return self._own.lacks(group, name)

    def keep(self, places: I32, ids: Sequence[PageId]) -> list[bool]:
        return self._own.keep(places, ids)

    def offer(self, pages: Pages, ids: Sequence[PageId]) -> bool:
        """Have every rank write its part, if there is room for it here."""
        if not self._own.offer(pages, ids):
            return False
        offer = rank_pb2.KeepPages(places=page_bytes(pages), ids=ids_to_bytes(ids))
        self._log.append(rank_pb2.RankEntry(offer=offer))
        self._to_copy = True
        return True

    def forget(self, ids: Sequence[PageId]) -> None:
        self.forget_runs(ids, ids)

    def forget_runs(self, ids: Sequence[PageId], ends: Sequence[PageId]) -> None:
        last = ids_to_bytes(self._own.forget_runs(ids, ends))
        self._log.append(rank_pb2.RankEntry(forget_runs=rank_pb2.ForgetRuns(ids=ids_to_bytes(ids), last=last)))

    def load(self, number: int, ids: Sequence[PageId], pages: Pages) -> None:
        self._loads.begin(number, ids)
        load = rank_pb2.LoadRuns(number=number, ids=ids_to_bytes(ids), pages=page_bytes(pages))
        for first, known in self._own.runs_of(ids):
            load.runs.add(first=first, ids=ids_to_bytes(known))
        self._log.append(rank_pb2.RankEntry(load_runs=load))
        self._own.load(number, ids, pages)

    def restored(self) -> Sequence[PagesRestored]:
        """Return which loads have ended on every rank since the last call."""
        return self._loads.ended(self._log.loaded_from_store())


class RankObjects(RankPart[PageObjects]):
    """Implements `RankMedium`: what another rank does with its part of a store, as rank 0 says."""

    def apply(self, entry: rank_pb2.RankEntry) -> bool:
        match entry.WhichOneof("entry"):
            case "offer":
                self._own.offer(_pages(entry.offer.places), ids_from_bytes(entry.offer.ids))
            case "load_runs":
                self._load(entry.load_runs)
            case "forget_runs":
                forget = entry.forget_runs
                self._own.forget_runs(ids_from_bytes(forget.ids), ids_from_bytes(forget.last))
            case _:
                return False
        return True

    def ended(self) -> Sequence[rank_pb2.LoadEnd]:
        ended = self._loads.ended()
        for end in ended:
            end.is_of_store = True
        return ended

    def _load(self, load: rank_pb2.LoadRuns) -> None:
        for run in load.runs:
            self._own.learn(run.first, ids_from_bytes(run.ids))
        ids = ids_from_bytes(load.ids)
        self._loads.begin(load.number, ids)
        self._own.load(load.number, ids, _pages(load.pages))


def _pages(data: bytes) -> I32:
    return from_bytes(data).astype(np.int32)
