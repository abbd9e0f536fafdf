"""Pages in files, of which each rank has its part: a log of segments of its own, under one number.

A page is there if every rank has its part. Rank 0 knows its own, and hears of the others when a load fails: what any
rank lacks, rank 0 forgets, so that nobody finds it before it is written again. All ranks are given the same pages in
the same order, so that they rarely differ: where one dropped a write, or was killed a little sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tensor_parallel.rank_log import (
    RankLog,
    from_bytes,
    ids_from_bytes,
    ids_to_bytes,
    page_bytes,
    to_bytes,
)
from diptych.engine.tiers.medium import MediumCounts
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages
from diptych.v1 import rank_pb2

GIVE_UP_MS: Final = 500  # at which a rank looks whether what it reads hangs


@dataclass(slots=True)
class _Load:
    ids: Sequence[PageId]
    num_left: int  # ranks
    error: str | None = None


class RankedFiles:
    """Implements `Medium` on rank 0, over its own part and those of the others."""

    def __init__(self, own: PageFiles, log: RankLog) -> None:
        self._own = own
        self._log = log
        self._loads: dict[int, _Load] = {}
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
        self._loads[number] = _Load(ids, self._log.size)
        load = rank_pb2.LoadPages(number=number, ids=ids_to_bytes(ids), pages=page_bytes(pages))
        self._log.append(rank_pb2.RankEntry(load=load))
        self._own.load(number, ids, pages)

    def restored(self) -> Sequence[PagesRestored]:
        """Return which loads have ended on every rank since the last call."""
        ended = [self._end(own.number, own.error or "") for own in self._own.restored()]
        ended += [self._end_elsewhere(end) for end in self._log.loaded()]
        return [each for each in ended if each is not None]

    def descriptors(self) -> Sequence[int]:
        return (*self._own.descriptors(), *self._log.restore_descriptors())

    def close(self) -> None:
        self._own.close()

    def finish_writes(self) -> None:
        self._own.finish_writes()

    def _end_elsewhere(self, end: rank_pb2.LoadEnd) -> PagesRestored | None:
        missing = from_bytes(end.missing).tolist()
        for number in missing:
            self._own.lose(self._loads[end.number].ids[number])
        self._own.reader.note_corrupt(end.corrupt)
        if end.error and not missing:  # its medium has failed
            self._own.reader.end(f"on another rank: {end.error}")
        return self._end(end.number, end.error)

    def _end(self, number: int, error: str) -> PagesRestored | None:
        load = self._loads[number]
        load.num_left -= 1
        load.error = load.error or error or None
        if load.num_left:
            return None
        del self._loads[number]
        return PagesRestored(number, load.error)


class RankFiles:
    """What another rank does with its part, as rank 0 says."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        self._ids: dict[int, Sequence[PageId]] = {}  # of loads on their way
        self._num_corrupt = 0  # that were reported

    @property
    def wait_ms(self) -> int | None:
        """How long it may take until `ended` is called again."""
        return GIVE_UP_MS if self._ids else None

    def keep(self, keep: rank_pb2.KeepPages) -> None:
        self._files.keep(from_bytes(keep.places).astype(np.int32), ids_from_bytes(keep.ids))

    def forget(self, ids: bytes) -> None:
        self._files.forget(ids_from_bytes(ids))

    def load(self, load: rank_pb2.LoadPages) -> None:
        ids = self._ids[load.number] = ids_from_bytes(load.ids)
        self._files.load(load.number, ids, from_bytes(load.pages).astype(np.int32))

    def ended(self) -> Sequence[rank_pb2.LoadEnd]:
        """Return which loads have ended since the last call, and how."""
        return [self._end(own.number, own.error) for own in self._files.restored()]

    def descriptors(self) -> Sequence[int]:
        return self._files.descriptors()

    def close(self) -> None:
        self._files.close()

    def _end(self, number: int, error: str | None) -> rank_pb2.LoadEnd:
        ids, num_corrupt = self._ids.pop(number), self._files.counts.read.num_corrupt
        missing = [at for at, page_id in enumerate(ids) if not self._files.has(page_id)] if error else []
        new, self._num_corrupt = num_corrupt - self._num_corrupt, num_corrupt
        return rank_pb2.LoadEnd(
            number=number, error=error or "", missing=to_bytes(np.array(missing, np.int64)), corrupt=new
        )
