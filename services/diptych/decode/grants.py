"""Grants pages to rooms that wait for them, as far as memory reaches: what prefill then writes into.

A granted page is IMPORTING until prefill's `HandOff` is verified.
"""

from __future__ import annotations

from diptych.decode.phases import Phase, Signal
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import Rooms
from diptych.engine.events import Effect, SendNote
from diptych.engine.kv_cache import KvCache
from diptych.engine.page_hash import prompt_hash
from diptych.engine.running import Running
from diptych.engine.waiting_queue import WaitingQueue
from diptych.kvtransfer.notes import PagesReady


class Grants:
    """Decides who is next."""

    def __init__(self, cache: KvCache, waiting: WaitingQueue, running: Running, rooms: Rooms) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._rooms = rooms

    def give(self, now_s: float) -> list[Effect]:
        """Grant what can be granted."""
        effects: list[Effect] = []
        while self._waiting and self._cache.has_row:
            request = self._waiting.peek(now_s)
            importing = [room.request for room in self._rooms if room.phase is Phase.IMPORTING]
            if not self._cache.admit(request, spare_pages=self._running.spare_pages(request, importing)):
                break
            self._waiting.take(request)
            room = self._rooms[request.room]
            effects.append(SendNote(room.peer, self._grant(room, now_s)))
        return effects

    def _grant(self, room: DecodeRoom, now_s: float) -> PagesReady:
        request = room.request
        room.on(Signal.GRANTED)
        room.granted = self._cache.begin_import(request)
        room.generations = tuple(self._cache.pool.generations(room.granted).tolist())
        room.granted_s = now_s
        room.stats.queue_s = now_s - room.arrival_s
        return PagesReady(
            room=request.room,
            pages=tuple(room.granted.tolist()),
            generations=room.generations,
            cached_prefix_len=request.cached_len,
            num_prompt_tokens=request.prompt_len,
            page_size=self._cache.page_size,
            prompt_hash=prompt_hash(request.tokens[: request.prompt_len], request.extra_key),
        )
