"""Moves the pages of a room to decode: which ones when, and pinned while somebody may read them.

It counts in decode's pages, whose size may be another than ours: a write names those that it fills, and all of ours
that have tokens of them.

Order of what the peer sees of a room: page writes, and when all have landed the `HandOff`. What a chunk completes moves
while the next one is computed; what the last one completes moves layer by layer behind the forward pass.

When its prompt is computed, a room hands off the note to decode, and the first token with its measurements.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.sampled import Sampled, pop_prompt_logprobs
from diptych.engine.values.events import Effect, SendNote, StreamPages, WritePages
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.finish import Finish
from diptych.generation.output import Output
from diptych.kvtransfer.notes import HandOff
from diptych.kvtransfer.ownership import Pages
from diptych.kvtransfer.transport import PageWrite
from diptych.prefill.room import PrefillRoom


class Sender:
    """Says what is to be written, in `effects`."""

    def __init__(self, cache: KvCache, rules: TransferRules, effects: list[Effect]) -> None:
        self._cache = cache
        self._rules = rules
        self._effects = effects

    def share(self, room: PrefillRoom) -> None:
        """Let other prompts reuse what is computed of this one, though it is not sent yet. Not while a step runs."""
        duplicates = self._cache.share(room.request, room.request.computed_len)
        if self._cache.pool.pinned(duplicates):
            room.duplicates.append(duplicates)
        else:
            self._cache.release_duplicates(duplicates)

    def move_complete_pages(self, room: PrefillRoom, now_s: float) -> None:
        """Move the full pages that decode lacks. Not while a step runs."""
        self._write(room, room.request.computed_len // room.page_size, WritePages, now_s)

    def follow_last_chunk(self, room: PrefillRoom, now_s: float) -> None:
        """Move the rest behind the step that computes it, which runs next; if not so, it moves with the hand-off."""
        if self._rules.by_layers:
            self._write(room, _num_pages(room), StreamPages, now_s)

    def hand_off(self, room: PrefillRoom, note: HandOff, now_s: float) -> None:
        """Move what is left, and then tell decode so."""
        self._write(room, _num_pages(room), WritePages, now_s)
        if self._cache.windows.num_groups:
            self._write_windows(room, now_s)
        if self._cache.pages_per_state:
            self._write_state(room, now_s)
        room.hand_off, room.hand_off_s, room.asked_s = note, now_s, now_s
        self._effects.append(SendNote(room.peer, note, stream=room.request.room))

    def ask_again(self, room: PrefillRoom, now_s: float) -> None:
        """The Ack may have been lost with a link that broke at decode's end only; decode answers as often as asked."""
        assert room.hand_off is not None
        room.asked_s = now_s
        self._effects.append(SendNote(room.peer, room.hand_off, digest=room.digest))

    def release(self, room: PrefillRoom) -> None:
        """Nobody reads the room's pages any more."""
        for pages in room.pinned:
            self._cache.pool.unpin(pages)
        for pages in room.duplicates:
            self._cache.release_duplicates(pages)

    def _write(
        self, room: PrefillRoom, end_page: int, effect: type[WritePages] | type[StreamPages], now_s: float
    ) -> None:
        """Fill decode's pages `[room.next_page, end_page)` of the request."""
        if end_page <= room.next_page:
            return
        size = self._cache.page_size
        end_token = min(end_page * room.page_size, room.request.prompt_len)
        first, skip_tokens = divmod(room.next_page * room.page_size, size)
        src = self._cache.pages_of(room.request)[first : -(-end_token // size)].copy()
        write = PageWrite(src, room.destination(room.next_page, end_page), skip_tokens=skip_tokens)
        room.next_page = end_page
        self._post(room, write, effect, now_s)

    def _write_windows(self, room: PrefillRoom, now_s: float) -> None:
        """Send what is live behind the prompt in layers with a window, group by group.

        Pages of another size begin where decode's first one begins. What is not here of it any more, nobody sees: see
        `HandedGroup`.
        """
        cache, request = self._cache, room.request
        num_tokens, num_groups = request.prompt_len, cache.windows.num_groups
        start = cache.windows.first_live(num_tokens, room.page_size) * room.page_size
        first, skip_tokens = divmod(start, cache.page_size)
        src = cache.window_table[request.row, first : cache.pages_for(num_tokens)]
        dst = room.destination_beside(cache.windows.num_live(num_tokens, room.page_size))
        if room.page_size == cache.page_size:
            self._post(room, PageWrite(src.flatten("F"), dst), WritePages, now_s)
            return
        num_passed = max(0, request.first_window - first)  # which the table names by a page of the text
        for pages, target in zip(src.T, dst.reshape(num_groups, -1), strict=True):
            write = PageWrite(pages.copy(), target, skip_tokens=skip_tokens)
            read = np.concatenate([cache.pages_of(request)[:1], pages[num_passed:]])
            self._post(room, write, WritePages, now_s, read)

    def _write_state(self, room: PrefillRoom, now_s: float) -> None:
        """Send the state after the prompt, which its last step has copied."""
        request, num_pages = room.request, room.groups[-1].num_pages
        (src,) = (each.pages for each in request.snapshots if each.num_tokens == request.prompt_len)
        self._post(room, PageWrite(src.copy(), room.destination_beside(num_pages), as_bytes=True), WritePages, now_s)

    def _post(
        self,
        room: PrefillRoom,
        write: PageWrite,
        effect: type[WritePages] | type[StreamPages],
        now_s: float,
        read: Pages | None = None,
    ) -> None:
        """`read`: the pages of `write.src`, each once; None: none is there twice."""
        pinned = write.src.astype(np.int32, copy=False) if read is None else read
        self._cache.pool.pin(pinned)
        room.pinned.append(pinned)
        room.writes_in_flight += 1
        self._effects.append(effect(room.request.room, room.peer, write, self._rules.flow(room.request, now_s)))


def _num_pages(room: PrefillRoom) -> int:
    """Return how many of decode's pages the whole prompt takes."""
    return -(-room.request.prompt_len // room.page_size)


def hand_off_note(room: PrefillRoom, first_token: int, finish: Finish | None, row: bytes) -> HandOff:
    """Return what decode hears; `finish` is set if the first token ends the request."""
    assert room.grant is not None
    return HandOff(
        room=room.request.room,
        first_token=first_token,
        finish=finish.value if finish else None,
        num_pages=len(room.grant.pages),
        generations=room.grant.generations,
        cached_tokens=room.request.cached_len,
        groups=room.groups,
        row=row,
    )


def first_output(room: PrefillRoom, row: Sampled, now_s: float, token_nbytes: int) -> Output:
    """Return what the client hears at once."""
    request, token_ids, logprobs, insight = row
    room.first_token_s = now_s
    room.note_moved(token_nbytes)
    room.stats.queue_s = room.first_step_s - room.arrival_s
    room.stats.compute_s = now_s - room.first_step_s
    prompt_logprobs = pop_prompt_logprobs(request)
    told = Output(request.room, 0, token_ids, None, None, room.stats, logprobs, prompt_logprobs)
    return told if insight is None else replace(told, insight=insight)
