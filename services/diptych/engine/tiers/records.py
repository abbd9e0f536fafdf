"""What a medium offers to whoever reads pages from it: records in runs, and a reader of them for each thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.page_format import Buffer


class Run(NamedTuple):
    """Records that lie one behind the other."""

    where: Any  # a file or an object, as the medium names it
    offset: int
    ids: list[PageId]
    pages: list[int]  # of the pool


class RecordReader(Protocol):
    """Reads records of a medium for one thread. What may wait raises `OSError`; what is gone `FileNotFoundError`."""

    def prepare(self, run: Run) -> None:
        """Make it possible that `read_cached` does not wait. This may."""
        ...

    def read_cached(self, run: Run, buffers: Sequence[Any]) -> int:
        """Fill `buffers` with what is in memory, without waiting; return how many bytes came. 0: nothing is there."""
        ...

    def read(self, run: Run, nbytes: int) -> Buffer:
        """Return so many bytes, or fewer at the end: good until the next call. This may wait."""
        ...

    def measure(self, where: Any) -> tuple[int, float]:
        """Read about as much as is read at once, not from memory; return how many bytes came, in how many seconds.

        This may wait.
        """
        ...

    def rest(self) -> None:
        """Nothing is to be read now: hold nothing that could be in somebody's way. This may wait."""
        ...


class Source(Protocol):
    """Where records are."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    def new_reader(self) -> RecordReader: ...

    def to_measure(self) -> Any | None:
        """Return what can be measured; None: there is nothing yet."""
        ...

    def lose(self, run: Run, page_id: PageId) -> None:
        """A page of a run is not what was written: let nobody find it."""
        ...

    def miss(self, run: Run) -> None:
        """There is nothing where a run was to be read."""
        ...
