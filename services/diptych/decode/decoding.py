"""Takes what steps computed: gives each room its next token, and ends those that are complete."""

from __future__ import annotations

from diptych.decode.rooms import Rooms
from diptych.engine.schedule.running import Running
from diptych.engine.schedule.sampled import (
    NO_TOKEN_FAILURE,
    Sampled,
    collect_prompt_logprobs,
    finish_of,
    refuse_token,
    sampled,
    take_plain,
    take_prompt_logprobs,
)
from diptych.engine.values.batch import StepResult
from diptych.engine.values.events import Effect, Emit
from diptych.generation.output import Output


class Decoding:
    """What it has to say goes to `effects`."""

    def __init__(self, running: Running, rooms: Rooms, effects: list[Effect], eos_ids: frozenset[int]) -> None:
        self._running = running
        self._rooms = rooms
        self._effects = effects
        self._eos_ids = eos_ids

    def commit(self, result: StepResult, now_s: float) -> None:
        """Take the result of the oldest step launched."""
        step = self._running.commit(now_s)
        if step.chunks:
            collect_prompt_logprobs(step.chunks, result)
        tokens, others = take_plain(step.sampled, result)
        if tokens.rooms:
            self._effects.append(tokens)
        for row in sampled(step.sampled, result, others):
            self._take_token(row, now_s)
        if step.chunks:
            self._running.share(step)

    def _take_token(self, row: Sampled, now_s: float) -> None:
        request, token_id, logprobs = row
        room = self._rooms[request.room]
        failure = refuse_token(request, token_id)
        if failure is NO_TOKEN_FAILURE:
            self._running.distrust(request)
        if failure is not None:
            self._rooms.drop(room, failure)
            return
        index = request.num_output_tokens
        request.append(token_id)
        room.measure_token(index, now_s)
        finish = finish_of(request, token_id, self._eos_ids)
        stats = room.stats if finish or index == 0 else None  # a client may stop reading before the end
        of_prompt = take_prompt_logprobs(request)
        output = Output(request.room, index, (token_id,), finish, None, stats, logprobs, of_prompt)
        if finish is None:
            self._effects.append(Emit(output))
        else:
            self._rooms.finish(room, output)
