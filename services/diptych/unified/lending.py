"""Cached prefixes that other workers pull from this one: what is here is pinned, written, and let go of.

Nothing waits for it and no step is longer by it: the transfer engine writes beside them. A pull is answered once, by
`Pulled`, after which nothing is written for it; one that was answered, or was to be stopped before it came, is
remembered for as long as a note may be late, so a note that comes twice is not answered again. Nor is one that comes
again while it is written, however long that takes.

It is looked for by the tokens themselves, in their namespace, and only for who asks for KV of the same making.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.arrays import TOKEN_NBYTES
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.peer_pages import Lent, PeerPages
from diptych.engine.values.core_report import CoreCounts, CoreReport, Holders
from diptych.engine.values.events import Effect, SendNote, WritePages
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.notes import Pull, Pulled
from diptych.kvtransfer.transport import PageWrite

KEEP_S: Final = 10.0  # that a pull is remembered which is over
MAX_KEPT: Final = 1 << 14  # pulls that are remembered; beyond it the oldest are forgotten early
MAX_LENT: Final = 16  # pulls that are written at a time


@dataclass(slots=True, eq=False)
class _Loan:
    """One pull that is being written."""

    peer: int
    lent: Lent
    is_stopped: bool = False  # its peer waits for our word that nothing is written any more


class Lending:
    """What it has to say goes to `effects`."""

    def __init__(self, cache: KvCache, effects: list[Effect], *, is_on: bool) -> None:
        self._cache = cache
        self._pages = PeerPages(cache)
        self._effects = effects
        self._is_on = is_on
        self._counts = CoreCounts()
        self._loans: dict[int, _Loan] = {}  # by id of the pull
        self._over: OrderedDict[tuple[int, int], float] = OrderedDict()  # (peer, id) -> until when it is remembered

    def has(self, number: int) -> bool:
        """Whether a pull of that id is being written."""
        return number in self._loans

    def on_pull(self, peer: int, note: Pull, *, is_taken: bool, now_s: float) -> None:
        """Write what is here, or say that nothing is. `is_taken`: a room here has the number of the pull."""
        self._forget_old(now_s)
        if (peer, note.room) in self._over or self._lends(peer, note.room):
            return  # it came twice, or its end came first
        self._remember(peer, note.room, now_s)
        refusal = self._refuse(note, is_taken or note.room in self._loans)
        lent = None if refusal else self._lend(note)
        if lent is None:
            self._effects.append(SendNote(peer, Pulled(note.room, 0, (), refusal or "nothing of it is cached here")))
        else:
            self._write(peer, note, lent)

    def on_stop(self, peer: int, number: int, now_s: float) -> None:
        """The pull is not wanted any more; perhaps it has never come."""
        self._remember(peer, number, now_s)
        if self._lends(peer, number):
            self._loans[number].is_stopped = True
        else:
            self._effects.append(_nothing_more(peer, number))

    def write_done(self, number: int, error: str | None, now_s: float) -> None:
        """What was written is there, and the note behind it is on its way; or it is not, and no note arrives."""
        loan = self._loans.pop(number)
        self._pages.take_back(loan.lent)
        self._remember(loan.peer, number, now_s)
        if error is None:
            self._counts.pages_lent += len(loan.lent.pages)
        if error is not None or loan.is_stopped:
            self._effects.append(_nothing_more(loan.peer, number))

    def forget(self, peer: int) -> None:
        """The link is gone, and so is all that was written over it."""
        for key in [key for key in self._over if key[0] == peer]:
            del self._over[key]

    def report(self) -> CoreReport:
        """Return what it has counted. The pages that it lends are the tree's."""
        return CoreReport(len(self._loans), Holders(), self._counts)

    def _lends(self, peer: int, number: int) -> bool:
        """Whether a pull of that peer is being written."""
        return number in self._loans and self._loans[number].peer == peer

    def _refuse(self, note: Pull, is_taken: bool) -> str:
        if not self._is_on:
            return "this worker lends nothing"
        if note.kv != self._cache.made_by or note.page_size != self._cache.page_size:
            return "its KV is of another making"
        if is_taken or len(self._loans) >= MAX_LENT or self._cache.pages_per_state:
            return "busy" if not self._cache.pages_per_state else "layers have states"
        end = len(note.tokens) // TOKEN_NBYTES // note.page_size
        num_pages = end - note.first_token // note.page_size
        is_whole = num_pages > 0 and len(note.pages) == num_pages + self._pages.num_beside(end)
        return "" if is_whole else "it grants other pages than it asks for"

    def _lend(self, note: Pull) -> Lent | None:
        """Lend what the grant has room for: behind a shorter prefix more of a chunk may be seen than was granted."""
        tokens, size = np.frombuffer(note.tokens, "<i8").astype(np.int64), note.page_size
        first = note.first_token // size
        room = len(note.pages) - (len(tokens) // size - first)
        lent = self._pages.lend(tokens, note.namespace, first)
        while lent is not None and len(lent.pages) - lent.num_pages > room:
            self._pages.take_back(lent)
            ends = range(first + lent.num_pages - 1, first, -1)
            end = next((end for end in ends if self._pages.num_beside(end) <= room), first)
            lent = self._pages.lend(tokens[: end * size], note.namespace, first)
        return lent

    def _write(self, peer: int, note: Pull, lent: Lent) -> None:
        self._loans[note.room] = _Loan(peer, lent)
        num_asked = (len(note.tokens) // TOKEN_NBYTES - note.first_token) // note.page_size
        num_beside = len(lent.pages) - lent.num_pages
        written = [*range(lent.num_pages), *range(num_asked, num_asked + num_beside)]
        pages = np.array(note.pages, np.int64)[written]
        generations = tuple(note.generations[index] for index in written)
        flow = Flow(stream=note.room, timeout_s=note.timeout_s, with_digest=True)
        self._effects.append(WritePages(note.room, peer, PageWrite(lent.pages.copy(), pages), flow))
        self._effects.append(SendNote(peer, Pulled(note.room, lent.num_pages, generations), stream=note.room))

    def _remember(self, peer: int, number: int, now_s: float) -> None:
        self._over[peer, number] = now_s + KEEP_S
        self._over.move_to_end((peer, number))
        self._forget_old(now_s)

    def _forget_old(self, now_s: float) -> None:
        while self._over:
            key, until_s = next(iter(self._over.items()))
            if until_s > now_s and len(self._over) <= MAX_KEPT:
                break
            del self._over[key]


def _nothing_more(peer: int, number: int) -> SendNote:
    return SendNote(peer, Pulled(number, 0, ()))
