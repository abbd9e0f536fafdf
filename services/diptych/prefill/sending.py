"""Moves the pages of a room to decode: which ones when, and pinned while somebody may read them.

It counts in decode's pages, whose size may be another than ours: a write names those that it fills, and all of ours
that have tokens of them.

Order of what the peer sees of a room: page writes, and then the `HandOff`, with the last of them.
"""

from __future__ import annotations

from diptych.engine.events import Effect, SendNote, WritePages
from diptych.engine.kv_cache import KvCache
from diptych.kvtransfer.notes import HandOff
from diptych.prefill.room import PrefillRoom


class Sender:
    """Says what is to be written, in `effects`."""

    def __init__(self, cache: KvCache, effects: list[Effect]) -> None:
        self._cache = cache
        self._effects = effects

    def move_complete_pages(self, room: PrefillRoom) -> None:
        """Move the full pages that decode lacks; the rest follows with the hand-off. Not while a step runs."""
        end_page = room.request.computed_len // room.page_size
        if end_page > room.next_page:
            self._write(room, end_page, None)

    def hand_off(self, room: PrefillRoom, note: HandOff, now_s: float) -> None:
        """Move what is left, and then tell decode so."""
        room.hand_off, room.asked_s = note, now_s
        self._write(room, -(-room.request.prompt_len // room.page_size), note)

    def ask_again(self, room: PrefillRoom, now_s: float) -> None:
        """The Ack may have been lost with a link that broke at decode's end only; decode answers as often as asked."""
        assert room.hand_off is not None
        room.asked_s = now_s
        self._effects.append(SendNote(room.peer, room.hand_off))

    def release(self, room: PrefillRoom) -> None:
        """Nobody reads the room's pages any more."""
        for pages in room.pinned:
            self._cache.pool.unpin(pages)

    def _write(self, room: PrefillRoom, end_page: int, note: HandOff | None) -> None:
        """Write what fills decode's pages `[room.next_page, end_page)` of the request, and then `note`."""
        size = self._cache.page_size
        end_token = min(end_page * room.page_size, room.request.prompt_len)
        first, skip_tokens = divmod(room.next_page * room.page_size, size)
        src = self._cache.pages_of(room.request)[first : -(-end_token // size)].copy()
        dst = room.destination(room.next_page, end_page)
        self._cache.pool.pin(src)
        room.pinned.append(src)
        room.writes_in_flight += 1
        room.next_page = end_page
        self._effects.append(WritePages(room.request.room, room.peer, src, dst, note, skip_tokens))
