"""What is the same of a medium of which each rank has its part, whatever medium it is: on rank 0, and on the others.

Rank 0 answers by its own part. What changes parts goes to the others by the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from diptych.engine.cache.page_ids import PageId
from diptych.engine.tensor_parallel.parts.ranked_loads import Part, RankedLoads, RankLoads
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tiers.medium import Medium, MediumCounts
from diptych.v1 import rank_pb2


class OwnPart(Medium, Part, Protocol):
    """The part of one rank."""


P = TypeVar("P", bound=OwnPart)


class RankedPart(Generic[P]):
    """Those of all ranks, on rank 0. Who keeps pages says so: `_to_copy`."""

    def __init__(self, own: P, log: RankLog) -> None:
        self._own = own
        self._log = log
        self._loads = RankedLoads(own, log.size)
        self._to_copy = False  # since `finish_copies`
        self.capacity = own.capacity

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

    def finish_copies(self) -> None:
        """Return when every rank has applied the log so far, and so has copied what was to be kept."""
        if self._to_copy:
            self._log.ask(rank_pb2.RankEntry(finish_saves=True))
            self._to_copy = False

    def descriptors(self) -> Sequence[int]:
        return (*self._own.descriptors(), *self._log.restore_descriptors())

    def close(self) -> None:
        self._own.close()

    def finish_writes(self) -> None:
        self._own.finish_writes()


class RankPart(Generic[P]):
    """That of another rank."""

    def __init__(self, own: P) -> None:
        self._own = own
        self._loads = RankLoads(own)

    @property
    def wait_ms(self) -> int | None:
        return self._loads.wait_ms

    def descriptors(self) -> Sequence[int]:
        return self._own.descriptors()

    def close(self) -> None:
        self._own.close()
