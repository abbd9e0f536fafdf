"""What a room hands off when its prompt is computed: the note to decode, and the first token with its measurements."""

from __future__ import annotations

from diptych.engine.schedule.sampled import Sampled, take_prompt_logprobs
from diptych.generation.finish import Finish
from diptych.generation.output import Output
from diptych.kvtransfer.notes import HandOff
from diptych.prefill.room import PrefillRoom


def hand_off_note(room: PrefillRoom, first_token: int, finish: Finish | None) -> HandOff:
    """Return what decode hears; `finish` is set if the first token ends the request."""
    assert room.grant is not None
    return HandOff(
        room=room.request.room,
        first_token=first_token,
        finish=finish.value if finish else None,
        num_pages=len(room.grant.pages),
        generations=room.grant.generations,
        cached_tokens=room.request.cached_len,
    )


def first_output(room: PrefillRoom, row: Sampled, now_s: float, token_nbytes: int) -> Output:
    """Return what the client hears at once."""
    assert room.grant is not None
    request, token_ids, logprobs = row
    room.first_token_s = now_s
    room.stats.pages_moved = len(room.grant.pages)
    room.stats.bytes_moved = room.stats.pages_moved * room.page_size * token_nbytes
    room.stats.queue_s = room.first_step_s - room.arrival_s
    room.stats.compute_s = now_s - room.first_step_s
    prompt_logprobs = take_prompt_logprobs(request)
    return Output(request.room, 0, token_ids, None, None, room.stats, logprobs, prompt_logprobs)
