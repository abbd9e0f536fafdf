"""Gives pages to rooms that wait for them, as far as memory reaches: for prefill to write into, or to be computed here.

A granted page is IMPORTING until prefill's `HandOff` is verified. Both kinds of rooms wait in one queue, so that none
passes the other. What `reserve` says is left to others who share the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.decode.phases import Phase, Signal
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import Rooms
from diptych.engine.events import Effect, SendNote
from diptych.engine.kv_cache import KvCache
from diptych.engine.page_hash import prompt_hash
from diptych.engine.request import Request
from diptych.engine.running import Running
from diptych.engine.waiting_queue import WaitingQueue
from diptych.kvtransfer.notes import PagesReady


@dataclass(frozen=True, slots=True)
class Spare:
    """What must be left of a cache when a request has got its own."""

    pages: int = 0
    rows: int = 0  # requests that can still be admitted


class Grants:
    """Decides who is next."""

    def __init__(
        self, cache: KvCache, waiting: WaitingQueue, running: Running, rooms: Rooms, reserve: Callable[[], Spare]
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._rooms = rooms
        self._reserve = reserve

    @property
    def num_pages_left(self) -> int:
        """Pages that could be given now; 0 while rooms wait for theirs."""
        reserve = self._reserve()
        if self._waiting or self._rooms.retracted or self._cache.num_free_rows <= reserve.rows:
            return 0
        return max(0, self._cache.num_available - reserve.pages)

    def give(self, now_s: float) -> list[Effect]:
        """Grant what can be granted; those retracted go first."""
        effects: list[Effect] = []
        while self._waiting and self._cache.has_row and not self._rooms.retracted:
            request = self._waiting.peek(now_s)
            if not self._admit(request):
                break
            self._waiting.take(request)
            room = self._rooms[request.room]
            room.granted_s = now_s
            room.stats.queue_s = room.stats.grant_s = now_s - room.arrival_s
            if room.phase is Phase.WAITING:
                self._run(room)
            else:
                effects.append(SendNote(room.peer, self._grant(room)))
        return effects

    def _admit(self, request: Request) -> bool:
        importing = [room.request for room in self._rooms if room.phase is Phase.IMPORTING]
        reserve = self._reserve()
        spare_pages = self._running.spare_pages(request, importing) + reserve.pages
        return self._cache.admit(request, spare_pages=spare_pages, spare_rows=reserve.rows)

    def _run(self, room: DecodeRoom) -> None:
        room.on(Signal.ADMITTED)
        room.stats.cached_tokens = room.request.cached_len
        self._running.extend(room.request)

    def _grant(self, room: DecodeRoom) -> PagesReady:
        request = room.request
        room.on(Signal.GRANTED)
        room.granted = self._cache.begin_import(request)
        room.generations = tuple(self._cache.pool.generations(room.granted).tolist())
        return PagesReady(
            room=request.room,
            pages=tuple(room.granted.tolist()),
            generations=room.generations,
            cached_prefix_len=request.cached_len,
            num_prompt_tokens=request.prompt_len,
            page_size=self._cache.page_size,
            prompt_hash=prompt_hash(request.tokens[: request.prompt_len], request.extra_key),
        )
