"""Decides who may use a KV page: each page of a pool is in exactly one state, and `TRANSITIONS` lists every legal move.

Nothing else assigns a page's state, and pages come back to the free list on one path only. Each grant of a page has a
generation: `(page, generation)` names one grant for ever, so a late message about an earlier grant is recognised.

    FREE ── allocate ──> OWNED ── release ──> FREE
                         OWNED ── cache ──> CACHED ── uncache ──> FREE
                         OWNED ── begin_import ──> IMPORTING ── finish_import ──> OWNED
                                                   IMPORTING ── quarantine ──> QUARANTINE ── release_quarantine ──> FREE

Export pins are counted beside the state: a pinned page is the source of a transfer in flight, so it may be cached, but
neither freed nor opened to a remote writer.
An operation takes all of its pages or none: when it raises `InvalidTransition` nothing has changed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from diptych.common.errors import InvalidTransition

Pages = npt.NDArray[np.int32]

NULL_PAGE: Final = 0  # pads page tables; never granted


class PageState(enum.IntEnum):
    """Whom a page belongs to."""

    FREE = 0
    OWNED = 1  # one request's
    CACHED = 2  # the radix tree's; requests may read it
    IMPORTING = 3  # granted to a remote writer
    QUARANTINE = 4  # of an aborted import: the remote writer may still write


class Operation(enum.IntEnum):
    """What can be asked of a page; one method of `PagePool` each."""

    ALLOCATE = 0
    RELEASE = 1
    CACHE = 2
    UNCACHE = 3
    BEGIN_IMPORT = 4
    FINISH_IMPORT = 5
    QUARANTINE = 6
    RELEASE_QUARANTINE = 7
    PIN = 8
    UNPIN = 9


TRANSITIONS: Final[Mapping[tuple[PageState, Operation], PageState]] = {
    (PageState.FREE, Operation.ALLOCATE): PageState.OWNED,
    (PageState.OWNED, Operation.RELEASE): PageState.FREE,
    (PageState.OWNED, Operation.CACHE): PageState.CACHED,
    (PageState.OWNED, Operation.BEGIN_IMPORT): PageState.IMPORTING,
    (PageState.OWNED, Operation.PIN): PageState.OWNED,
    (PageState.OWNED, Operation.UNPIN): PageState.OWNED,
    (PageState.CACHED, Operation.UNCACHE): PageState.FREE,
    (PageState.CACHED, Operation.PIN): PageState.CACHED,
    (PageState.CACHED, Operation.UNPIN): PageState.CACHED,
    (PageState.IMPORTING, Operation.FINISH_IMPORT): PageState.OWNED,
    (PageState.IMPORTING, Operation.QUARANTINE): PageState.QUARANTINE,
    (PageState.QUARANTINE, Operation.RELEASE_QUARANTINE): PageState.FREE,
}
NEEDS_NO_PIN: Final = frozenset({Operation.RELEASE, Operation.UNCACHE, Operation.BEGIN_IMPORT})
NEEDS_A_PIN: Final = frozenset({Operation.UNPIN})
KEEPS_STATE: Final = frozenset({Operation.PIN, Operation.UNPIN})  # every other operation leads to one state

_NO_STATE, _NO_ENTRY = 126, 127  # the state of the null page, and what follows a state that allows no such move
_FEW: Final = 32  # pages: of fewer a set is sooner made than arrays
_MAX_PAGES_SHOWN: Final = 8


class PagePool:
    """The books of one KV pool: state, generation and export pins of every page. Costs O(pages named) a call."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the null page and at least one more, not {num_pages} pages")
        self._state = np.full(num_pages, PageState.FREE, np.int8)
        self._generation = np.zeros(num_pages, np.uint32)
        self._state[NULL_PAGE] = _NO_STATE
        self._pins = np.zeros(num_pages, np.int32)
        self._num_pins = 0  # of all pages: mostly there are none
        self._free = np.arange(num_pages - 1, NULL_PAGE, -1, dtype=np.int32)  # a stack: its first num_free entries
        self._num_free = num_pages - 1
        self._seat = np.zeros(num_pages, np.int32)  # scratch of `_states_of`
        self._table = _tables()

    @property
    def capacity(self) -> int:
        """Pages that can be granted: all but the null page."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> Pages | None:
        """Grant `count` pages, each with a new generation; `None`, and no change, when fewer are free."""
        if count < 0:
            raise InvalidTransition(f"cannot allocate {count} pages")
        if count > self._num_free:
            return None
        # Reversed here and in `_free_pages`: runs of neighbours stay runs, and a transfer can merge neighbours.
        pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._apply(Operation.ALLOCATE, pages)
        self._num_free -= count
        self._generation.put(pages, self._generation.take(pages) + 1)
        return pages

    def release(self, pages: Pages) -> None:
        """End the request's ownership; the pages are free."""
        self._free_pages(Operation.RELEASE, pages)

    def cache(self, pages: Pages) -> None:
        """Hand the request's pages to the radix tree."""
        self._apply(Operation.CACHE, pages)

    def uncache(self, pages: Pages) -> None:
        """Free pages that the radix tree evicted."""
        self._free_pages(Operation.UNCACHE, pages)

    def begin_import(self, pages: Pages) -> None:
        """Open the pages to a remote writer."""
        self._apply(Operation.BEGIN_IMPORT, pages)

    def finish_import(self, pages: Pages) -> None:
        """The remote writer is done: the pages are the request's again."""
        self._apply(Operation.FINISH_IMPORT, pages)

    def quarantine(self, pages: Pages) -> None:
        """The import was aborted while the remote writer may still write."""
        self._apply(Operation.QUARANTINE, pages)

    def release_quarantine(self, pages: Pages) -> None:
        """No more writes can come: the writer said so, or its endpoint is closed."""
        self._free_pages(Operation.RELEASE_QUARANTINE, pages)

    def pin(self, pages: Pages) -> None:
        """Keep the pages as they are while a transfer reads them. Pins are counted."""
        self._pins[self._apply(Operation.PIN, pages)] += 1
        self._num_pins += len(pages)

    def unpin(self, pages: Pages) -> None:
        """Take one export pin off each page."""
        self._pins[self._apply(Operation.UNPIN, pages)] -= 1
        self._num_pins -= len(pages)

    def pinned(self, pages: Pages) -> bool:
        """Tell whether any of the pages has an export pin."""
        self._states_of(pages)
        return bool(self._pins[pages].any())

    def generations(self, pages: Pages) -> npt.NDArray[np.uint32]:
        """Return the generation of each page's latest grant."""
        self._states_of(pages)
        return self._generation[pages]

    def holds(self, pages: Pages, generations: npt.NDArray[np.uint32]) -> bool:
        """Tell whether every grant `(page, generation)` is still in force. False, not an error, for any nonsense."""
        if len(pages) != len(generations) or not self._in_range(pages).all():
            return False
        current = self._generation[pages] == generations
        return bool((current & (self._state[pages] != PageState.FREE)).all())

    def states(self, pages: Pages) -> npt.NDArray[np.int8]:
        """Return the `PageState` of each page."""
        return self._states_of(pages)

    def counts(self) -> dict[str, int]:
        """Return the number of pages in each state; `exporting` pages are also counted in theirs."""
        free, owned, cached, importing, quarantined = np.bincount(self._state[1:], minlength=len(PageState)).tolist()
        return {
            "free": free,
            "owned": owned,
            "cached": cached,
            "importing": importing,
            "quarantined": quarantined,
            "exporting": int(np.count_nonzero(self._pins)),
        }

    def check(
        self,
        *,
        owned: Iterable[Pages] = (),
        cached: Iterable[Pages] = (),
        importing: Iterable[Pages] = (),
        quarantined: Iterable[Pages] = (),
    ) -> list[str]:
        """Compare what each holder claims with the books; return what is wrong, `[]` when clean. O(pool)."""
        claims = {
            PageState.OWNED: _joined(owned),
            PageState.CACHED: _joined(cached),
            PageState.IMPORTING: _joined(importing),
            PageState.QUARANTINE: _joined(quarantined),
        }
        return [*self._check_books(), *self._check_claims(claims)]

    def _apply(self, operation: Operation, pages: Pages) -> Pages:
        if not len(pages):
            return pages
        after = self._states_of(pages).tobytes().translate(self._table[operation])
        wrong = _NO_ENTRY in after or (operation in NEEDS_A_PIN and not self._pins.take(pages).all())
        if wrong or (self._num_pins and operation in NEEDS_NO_PIN and np.count_nonzero(self._pins.take(pages))):
            self._refuse(operation, pages, np.frombuffer(after, np.int8))
        if operation not in KEEPS_STATE:
            self._state.put(pages, after[0])
        return pages

    def _free_pages(self, operation: Operation, pages: Pages) -> None:
        if num_pages := len(self._apply(operation, pages)):
            self._free[self._num_free : self._num_free + num_pages] = pages[::-1]
            self._num_free += num_pages

    def _states_of(self, pages: Pages) -> npt.NDArray[np.int8]:
        """Return the state of each page, all of which must be pages of this pool, none of them twice."""
        num_pages = len(pages)
        try:
            states = self._state.take(pages.astype(np.uint32))  # numbers below 0 are beyond the end, too
        except IndexError:
            states = self._state[:1]
        if _NO_STATE in states.tobytes():
            raise InvalidTransition(f"not pages of this pool: {_shown(pages[~self._in_range(pages)])}")
        if num_pages > _FEW or len({*pages.tolist()}) < num_pages:
            # Each page seats its place in the list; of a page listed twice only one place stays seated.
            self._seat[pages] = places = np.arange(num_pages, dtype=np.int32)
            if np.count_nonzero(self._seat[pages] != places):
                raise InvalidTransition(f"pages listed twice: {_shown(pages[self._seat[pages] != places])}")
        return states

    def _in_range(self, pages: Pages) -> npt.NDArray[np.bool_]:
        return (pages > NULL_PAGE) & (pages < len(self._state))

    def _refuse(self, operation: Operation, pages: Pages, after: npt.NDArray[np.int8]) -> NoReturn:
        """Raise `InvalidTransition` with the first reason."""
        why, wrong = "in a state that does not allow it", after == _NO_ENTRY
        if not wrong.any():
            is_pinned = self._pins[pages] > 0
            why, wrong = ("being exported", is_pinned) if operation in NEEDS_NO_PIN else ("not pinned", ~is_pinned)
        page = int(pages[wrong][0])
        state = PageState(self._state[page]).name
        raise InvalidTransition(f"{operation.name} of pages {why}: {_shown(pages[wrong])}; page {page} is {state}")

    def _check_books(self) -> Iterator[str]:
        listed = self._free[: self._num_free]
        if not np.array_equal(np.sort(listed), 1 + np.flatnonzero(self._state[1:] == PageState.FREE)):
            yield "the free list is not the set of FREE pages"
        for state in (PageState.FREE, PageState.IMPORTING, PageState.QUARANTINE):
            yield from _report(f"{state.name} pages with an export pin", (self._state == state) & (self._pins != 0))
        yield from _report("negative pin counts", self._pins < 0)
        if self._pins.sum() != self._num_pins:
            yield f"{self._num_pins} export pins are counted, and pages have {self._pins.sum()}"

    def _check_claims(self, claims: Mapping[PageState, Pages]) -> Iterator[str]:
        everything = _joined(claims.values())
        yield from _report_pages("claims of pages outside the pool", everything[~self._in_range(everything)])
        num_claims = np.bincount(everything[self._in_range(everything)], minlength=len(self._state))
        yield from _report("pages claimed twice", num_claims > 1)
        for state, pages in claims.items():
            pages = pages[self._in_range(pages)]
            yield from _report_pages(f"pages claimed as {state.name} but not so", pages[self._state[pages] != state])
            yield from _report(
                f"{state.name} pages leaked: nobody claims them", (self._state == state) & (num_claims == 0)
            )


def _tables() -> list[bytes]:
    """`TRANSITIONS` as a row of each operation: at the place of a state, the one after it."""
    rows = [[TRANSITIONS.get((state, operation), _NO_ENTRY) for state in PageState] for operation in Operation]
    return [bytes(row).ljust(256, bytes([_NO_ENTRY])) for row in rows]


def _joined(claims: Iterable[Pages]) -> Pages:
    return np.concatenate([np.zeros(0, np.int32), *claims])


def _report(what: str, wrong: npt.NDArray[np.bool_]) -> Iterator[str]:
    yield from _report_pages(what, np.flatnonzero(wrong).astype(np.int32))


def _report_pages(what: str, pages: Pages) -> Iterator[str]:
    if len(pages):
        yield f"{what}: {_shown(pages)}"


def _shown(pages: Pages) -> str:
    shown = ", ".join(map(str, pages[:_MAX_PAGES_SHOWN].tolist()))
    hidden = len(pages) - _MAX_PAGES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
