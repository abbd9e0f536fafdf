"""Takes requests in: what can't be served is refused at once, and the rest becomes rooms that wait.

A room is queued to be computed once it has all that it waits for: decode's pages, and its grammar if it has one.
"""

from __future__ import annotations

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.admission import refuse
from diptych.engine.schedule.waiting_queue import WaitingQueue
from diptych.engine.values.events import Effect, Emit, Start, compile_grammar
from diptych.engine.values.limits import Limits
from diptych.generation.grammar import Matcher
from diptych.generation.output import Failure, FailureCode, Output
from diptych.generation.page_hash import prompt_hash
from diptych.kvtransfer.notes import Abort, PagesReady
from diptych.prefill.phases import Phase
from diptych.prefill.rendezvous import Rendezvous
from diptych.prefill.room import PrefillRoom
from diptych.prefill.rooms import Rooms


class Arrivals:
    """What it has to say goes to `effects`."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        waiting: WaitingQueue,
        rooms: Rooms,
        rendezvous: Rendezvous,
        effects: list[Effect],
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting = waiting
        self._rooms = rooms
        self._rendezvous = rendezvous
        self._effects = effects

    def start(self, event: Start, max_tokens: int, now_s: float) -> None:
        """Take a request of at most `max_tokens`, prompt and output."""
        request = event.request
        known, num_waiting = request.room in self._rooms, len(self._waiting)
        failure = refuse(request, self._limits, is_known=known, max_tokens=max_tokens, num_waiting=num_waiting)
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.given_len = self._cache.cached_len(request)
        room = PrefillRoom(request, event.peer, arrival_s=now_s)
        self._rooms.add(room)
        if not request.is_ready:
            self._effects.append(compile_grammar(request))
        match self._rendezvous.take(event.peer, request.room):
            case PagesReady() as grant:
                self.take_grant(room, grant)
            case Abort(_, _, message):
                room.abort_ack_sent = True
                self._rooms.fail(room, Failure(FailureCode.ABORTED, f"decode gave up: {message}"))

    def take_grant(self, room: PrefillRoom, grant: PagesReady) -> None:
        problem = room.refuse_grant(grant, prompt_hash)
        if problem:
            self._rooms.fail(room, Failure(FailureCode.INVALID, problem))
            return
        room.take_grant(grant)
        if room.request.is_ready:
            self._waiting.add(room.request)

    def take_matcher(self, room: PrefillRoom, matcher: Matcher) -> None:
        room.request.matcher = matcher
        if room.phase is Phase.WAITING:
            self._waiting.add(room.request)
