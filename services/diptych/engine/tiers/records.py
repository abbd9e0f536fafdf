"""What a medium offers to whoever reads pages from it: records in runs, and a reader of them for each thread."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.page_format import Buffer
from diptych.engine.tiers.record_bytes import Landing


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

    def read_cached(self, run: Run, landing: Landing) -> None:
        """Have `landing` take what is in memory of the bytes that it lacks, without waiting."""
        ...

    def read(self, run: Run, start: int, nbytes: int) -> Buffer:
        """Return some of so many bytes, from byte `start` of the run on: good until the next call. This may wait.

        None come at the end of what is there.
        """
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
