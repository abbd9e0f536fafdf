"""Takes requests in: what can't be served is refused at once, and the rest becomes rooms that wait for pages."""

from __future__ import annotations

from diptych.common.members.roles import LegKind
from diptych.decode.phases import Phase
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import Rooms
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.admission import refuse
from diptych.engine.schedule.waiting_queue import WaitingQueue
from diptych.engine.values.events import Effect, Emit, Start, compile_grammar
from diptych.engine.values.limits import Limits
from diptych.generation.output import Failure, FailureCode, Output
from diptych.generation.stop.conditions import end_ids


class Arrivals:
    """What it has to say goes to `effects`."""

    def __init__(
        self, cache: KvCache, limits: Limits, waiting: WaitingQueue, rooms: Rooms, effects: list[Effect]
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting = waiting
        self._rooms = rooms
        self._effects = effects

    def take(self, event: Start, max_tokens: int, now_s: float) -> None:
        """Take a request of at most `max_tokens`, prompt and output."""
        request = event.request
        failure = self._refuse(event, max_tokens)
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.max_len = min(request.max_len, max_tokens)
        request.end_ids = end_ids(request.params, self._limits.eos_ids)
        if event.kind is LegKind.LOCAL:
            request.given_len = self._cache.cached_len(request)
            self._rooms.add(DecodeRoom(request, 0, now_s, Phase.WAITING))
        else:
            request.given_len = request.num_tokens
            request.is_imported = True
            request.prompt_logprobs = None  # prefill reports them
            self._rooms.add(DecodeRoom(request, event.peer, now_s, Phase.PREALLOCATING))
        if not request.is_ready:  # prefill's writing needn't wait for it: only the hand-off does
            self._effects.append(compile_grammar(request))

    def _refuse(self, event: Start, max_tokens: int) -> Failure | None:
        request = event.request
        known, num_waiting = request.room in self._rooms, len(self._waiting)
        failure = refuse(request, self._limits, is_known=known, max_tokens=max_tokens, num_waiting=num_waiting)
        if failure is None and event.kind is not LegKind.LOCAL and event.peer not in self._rooms.linked:
            return Failure(FailureCode.PEER_LOST, f"no link to prefill worker {event.peer:016x}")
        return failure
