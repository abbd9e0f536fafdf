"""Pages that a store keeps together: how many, under which name, and which of a text are there. Pure.

A text is cut in *runs* of as many pages each, from its beginning on, and each whole run is one object, whose name is
made of the terms and of the key of its last page: the proof of all tokens up to there. So whoever has the tokens knows
the names of all objects that could help, and nobody keeps a list of them.

What lies beside the pages of tokens is needed behind the last one alone: an *end* is one more object behind a run, with
the pages that layers with a window see from there, and the state. It is named by its last page, too. Not every run has
one: it is there where somebody has ended, or parted from another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.engine.cache.page_ids import PageId

RUN_TOKENS: Final = 256
RUN_NBYTES: Final = 8 * 2**20  # of a run, at most, or one page
WIDTH: Final = 8  # objects that are asked for at once
MOST_ENDS: Final = 4 * WIDTH  # that are asked for of a text, the last ones: each turn of a conversation leaves one


def run_pages(page_size: int, record_nbytes: int) -> int:
    """Return how many pages are in a run: a power of two."""
    most = max(1, min(RUN_TOKENS // page_size, RUN_NBYTES // record_nbytes))
    return 1 << (most.bit_length() - 1)


def object_name(folder: str, last: PageId) -> str:
    """Return the name of the object that holds the run that ends with a page. `folder`: that of the terms."""
    key = last.key.hex()
    return f"{folder}/{key[:2]}/{key}"


def in_folders(name: str, others: Sequence[str]) -> list[str]:
    """Return the name of an object, and those of the same run in other folders."""
    _, _, end = name.partition("/")
    return [name, *(f"{folder}/{end}" for folder in others)]


class RunSearch:
    """Finds out how many runs of a text are there, when none is there without those before it.

    That holds of what was written, and mostly of what was deleted; where it does not, a load finds out. Some are asked
    for at once, the first unknown one among them: mostly that is missing, and it is over.
    """

    def __init__(self, num_runs: int) -> None:
        self.num_found = 0
        self._end = num_runs  # no run from this one on is there

    @property
    def is_over(self) -> bool:
        return self.num_found == self._end

    def to_ask(self) -> list[int]:
        """Return the runs that are to be asked for next."""
        spread = self._end - self.num_found - 1
        return sorted({self.num_found + spread * number // (WIDTH - 1) for number in range(WIDTH)})

    def tell(self, answers: Sequence[tuple[int, bool]]) -> None:
        """Each of these runs is there, or not."""
        self._end = min([self._end, *(run for run, is_there in answers if not is_there)])
        self.num_found = max([self.num_found, *(run + 1 for run, is_there in answers if is_there and run < self._end)])


class TextSearch:
    """Finds out how many runs of a text are there, and then which end is the last one: `end`, by the run before it.

    What is asked for has numbers: the runs, and behind them the ends.
    """

    def __init__(self, num_runs: int, ends: Sequence[int]) -> None:
        """`ends`: behind which runs there may be one, ascending."""
        self.end: int | None = None
        self._runs = RunSearch(num_runs)
        self._num_runs = num_runs
        self._ends = [*ends]  # that may be there

    @property
    def num_found(self) -> int:
        return self._runs.num_found

    @property
    def is_over(self) -> bool:
        return self._runs.is_over and not self._ends

    def to_ask(self) -> list[int]:
        if not self._runs.is_over:
            return self._runs.to_ask()
        return [self._num_runs + run for run in self._ends[-WIDTH:]]

    def tell(self, answers: Sequence[tuple[int, bool]]) -> None:
        if self._runs.is_over:
            self.end = max((number - self._num_runs for number, is_there in answers if is_there), default=None)
            self._ends = [] if self.end is not None else self._ends[:-WIDTH]
            return
        self._runs.tell(answers)
        if self._runs.is_over:
            self._ends = [run for run in self._ends if run < self._runs.num_found][-MOST_ENDS:]


class Place(NamedTuple):
    """Where a page is."""

    run: str  # the name of its object
    number: int  # in it


@dataclass(slots=True)
class _Run:
    first: int  # number of the first page that is known
    ids: Sequence[PageId]
    places: dict[bytes, Place]  # of these, by their keys
    until_s: float  # it is believed to be there


class RunIndex:
    """Remembers which runs are there, for a while and only so many: the store is not told of those who delete.

    Texts that part inside a run have their first pages there in several runs: these are found in the one that was
    added or looked for last.
    """

    def __init__(self, most_pages: int) -> None:
        self._most_pages = most_pages
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._at: dict[bytes, Place] = {}

    @property
    def num_pages(self) -> int:
        return len(self._at)

    def add(self, run: str, first: int, ids: Sequence[PageId], until_s: float) -> None:
        """A run is there. `ids`: of its pages from number `first` on."""
        known = self._runs.get(run)
        if known is not None and known.first <= first:
            known.until_s = until_s
            self._runs.move_to_end(run)
            self._at.update(known.places)
            return
        self.drop(run)
        places = {page_id.key: Place(run, number) for number, page_id in enumerate(ids, first)}
        self._runs[run] = _Run(first, ids, places, until_s)
        self._at.update(places)
        while len(self._at) > self._most_pages:
            self.drop(next(iter(self._runs)))

    def find(self, page_id: PageId, now_s: float) -> Place | None:
        place = self._at.get(page_id.key)
        return place if place is not None and now_s < self._runs[place.run].until_s else None

    def refind(self, run: str, first: int, now_s: float) -> bool:
        """Have the pages of a run found in it and in no other. False: they are not known now from number `first` on."""
        known = self._runs.get(run)
        if known is None or known.first > first or now_s >= known.until_s:
            return False
        self._at.update(known.places)
        return True

    def run_of(self, page_id: PageId) -> str | None:
        """Return the run in which a page is, or was."""
        place = self._at.get(page_id.key)
        return None if place is None else place.run

    def known(self, run: str) -> tuple[int, Sequence[PageId]]:
        """Return the number of the first page of a run that is known, and the pages from there on."""
        known = self._runs[run]
        return known.first, known.ids

    def ids_of(self, run: str) -> Sequence[PageId]:
        """Return the pages of a run that are known."""
        known = self._runs.get(run)
        return () if known is None else known.ids

    def drop(self, run: str) -> None:
        """Forget a run, and its pages, but for those that are found in another."""
        gone = self._runs.pop(run, None)
        for key in () if gone is None else gone.places:
            if (place := self._at.get(key)) is not None and place.run == run:
                del self._at[key]
