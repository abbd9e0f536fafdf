"""Loads of pages of which each rank has its part: they end with the slowest rank.

Rank 0 knows what its own medium has, and hears of the others when a load fails: what any rank lacks, rank 0 forgets, so
that nobody finds it before it is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from diptych.engine.cache.page_ids import PageId
from diptych.engine.tensor_parallel.rank_log import from_bytes, to_bytes
from diptych.engine.tiers.medium import MediumCounts
from diptych.engine.tiers.page_reader import PageReader
from diptych.engine.values.events import PagesRestored
from diptych.v1 import rank_pb2

GIVE_UP_MS: Final = 500  # at which a rank looks whether what it reads hangs


class Part(Protocol):
    """A rank's medium, as far as loads go."""

    reader: PageReader

    @property
    def counts(self) -> MediumCounts: ...

    def has(self, page_id: PageId) -> bool: ...

    def lose(self, page_id: PageId) -> None: ...

    def restored(self) -> Sequence[PagesRestored]: ...


@dataclass(slots=True)
class _Load:
    ids: Sequence[PageId]
    num_left: int  # ranks
    error: str | None = None


class RankedLoads:
    """Those of all ranks, on rank 0."""

    def __init__(self, own: Part, num_ranks: int) -> None:
        self._own = own
        self._num_ranks = num_ranks
        self._loads: dict[int, _Load] = {}

    def begin(self, number: int, ids: Sequence[PageId]) -> None:
        self._loads[number] = _Load(ids, self._num_ranks)

    def ended(self, elsewhere: Sequence[rank_pb2.LoadEnd]) -> Sequence[PagesRestored]:
        """Return which loads have ended on every rank since the last call; `elsewhere`: what other ranks told."""
        ended = [self._end(own.number, own.error or "") for own in self._own.restored()]
        ended += [self._end_elsewhere(end) for end in elsewhere]
        return [each for each in ended if each is not None]

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


class RankLoads:
    """Those of another rank."""

    def __init__(self, own: Part) -> None:
        self._own = own
        self._ids: dict[int, Sequence[PageId]] = {}  # of loads on their way
        self._num_corrupt = 0  # that were reported

    @property
    def wait_ms(self) -> int | None:
        """How long it may take until `ended` is called again."""
        return GIVE_UP_MS if self._ids else None

    def begin(self, number: int, ids: Sequence[PageId]) -> None:
        self._ids[number] = ids

    def ended(self) -> Sequence[rank_pb2.LoadEnd]:
        """Return which loads have ended since the last call, and how."""
        return [self._end(own.number, own.error) for own in self._own.restored()]

    def _end(self, number: int, error: str | None) -> rank_pb2.LoadEnd:
        ids, num_corrupt = self._ids.pop(number), self._own.counts.read.num_corrupt
        missing = [at for at, page_id in enumerate(ids) if not self._own.has(page_id)] if error else []
        new, self._num_corrupt = num_corrupt - self._num_corrupt, num_corrupt
        return rank_pb2.LoadEnd(
            number=number, error=error or "", missing=to_bytes(np.array(missing, np.int64)), corrupt=new
        )
