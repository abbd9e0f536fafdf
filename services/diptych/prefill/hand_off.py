"""What a room hands off when its prompt is computed: the note to decode, and the first token with its measurements."""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.finish import Finish
from diptych.engine.kv_cache import KvCache
from diptych.engine.output import Output
from diptych.engine.sampled import Sampled, take_prompt_logprobs
from diptych.kvtransfer.notes import HandOff
from diptych.kvtransfer.ownership import Pages
from diptych.prefill.room import PrefillRoom

Digest = Callable[[Pages], int]


class HandOffs:
    """Writes the notes."""

    def __init__(self, cache: KvCache, digest: Digest, page_nbytes: int) -> None:
        self._cache = cache
        self._digest = digest  # of the bytes in our pages
        self._page_nbytes = page_nbytes

    def note(self, room: PrefillRoom, first_token: int, finish: Finish | None) -> HandOff:
        """Return what decode hears; `finish` is set if the first token ends the request."""
        assert room.grant is not None
        granted = self._cache.pages_of(room.request)[room.first_page * room.page_size // self._cache.page_size :].copy()
        room.finish = finish or Finish.STOP
        room.stats.kv_digest = self._digest(granted)
        room.stats.pages_moved = len(room.grant.pages)
        room.stats.bytes_moved = room.stats.pages_moved * room.page_size * self._page_nbytes // self._cache.page_size
        return HandOff(
            room=room.request.room,
            first_token=first_token,
            finish=finish.value if finish else None,
            num_pages=len(room.grant.pages),
            kv_digest=room.stats.kv_digest,
            generations=room.grant.generations,
            cached_tokens=room.request.cached_len,
        )


def first_output(room: PrefillRoom, row: Sampled, now_s: float) -> Output:
    """Return what the client hears at once."""
    request, token_id, logprobs = row
    room.first_token_s = now_s
    room.stats.queue_s = room.first_step_s - room.arrival_s
    room.stats.compute_s = now_s - room.first_step_s
    prompt_logprobs = take_prompt_logprobs(request)
    return Output(request.room, 0, (token_id,), None, None, room.stats, logprobs, prompt_logprobs)
