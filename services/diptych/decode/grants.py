"""Gives pages to rooms that wait for them, as far as memory reaches: for prefill to write into, or to be computed here.

A granted page is IMPORTING until prefill's `HandOff` is verified. Both kinds of rooms wait in one queue, so that none
passes the other. What `reserve` says is left to others who share the cache.

A room whose prefix another one is about to bring lets others pass for a while: what is here then needs not be sent.
So does one that is computed here and whose adapter has no slot. One whose KV comes takes its slot when that is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from diptych.decode.phases import Phase, Signal
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import Rooms
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Rank, Turns
from diptych.engine.schedule.aside import Reason
from diptych.engine.schedule.extend_queue import pays_to_wait
from diptych.engine.schedule.prefixes_in_flight import PendingPrefix, PrefixesInFlight
from diptych.engine.schedule.running import Running
from diptych.engine.schedule.waiting_queue import WaitingQueue
from diptych.engine.values.events import Effect, SendNote
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.request import Request
from diptych.generation.page_hash import prompt_hash
from diptych.kvtransfer.notes import PagesReady

PATIENCE_S: Final = 5.0  # that a room waits for another one's pages


@dataclass(frozen=True, slots=True)
class Headroom:
    """What must be left of a cache when a request has got its own."""

    pages: int = 0
    rows: int = 0  # requests that can still be admitted


class Grants:
    """Decides who is next."""

    def __init__(
        self,
        cache: KvCache,
        waiting: WaitingQueue,
        running: Running,
        rooms: Rooms,
        reserve: Callable[[], Headroom],
        cost: PromptCost,
        turns: Turns = ENOUGH_SLOTS,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._rooms = rooms
        self._reserve = reserve
        self._cost = cost
        self._turns = turns
        self._importing: list[DecodeRoom] = []  # and some that have gone on since this was last looked at
        self._in_flight = PrefixesInFlight(cache.page_size)  # that prefill brings

    def num_pages_left(self) -> int:
        """Return the pages that tokens could get now, beside those of a state or window; 0 while rooms wait for any."""
        if self._waiting.has_next or self._rooms.retracted.by_room:
            return 0
        reserve = self._reserve()
        if self._cache.num_free_rows <= reserve.rows:
            return 0
        return max(0, self._cache.num_available - reserve.pages - self._cache.most_beside - self._cache.num_owed)

    def grant(self, now_s: float) -> list[Effect]:
        """Grant what can be granted; those retracted go first."""
        effects: list[Effect] = []
        if self._waiting.has_aside:
            for request in self._waiting.bring_back(now_s):
                self._expect(request)
        while self._waiting.has_next and not self._rooms.retracted.by_room:
            reserve = self._reserve()
            if self._cache.num_free_rows <= reserve.rows:
                break  # before a room is looked at: a worker without a row is asked at each step
            request = self._waiting.peek(now_s)
            room = self._rooms.by_room[request.room]
            reason = self._reason_to_wait(room, now_s)
            if reason is not None and self._waiting.set_aside(reason):
                self._expect(request)
                continue
            slot_reason = self._reason_without_slot(room)
            if slot_reason is not None:
                if not self._waiting.set_aside(slot_reason):
                    break
                self._expect(request)
            elif self._admit(request, reserve):
                effects += self._begin(room, now_s)
            elif not self._waiting.set_aside_for_restore():
                break
        return effects

    def next_s(self) -> float | None:
        """Return when patience ends."""
        return self._waiting.next_s()

    def _expect(self, request: Request) -> None:
        """Look again at what will be computed here of a request that is served alone. It keeps its place."""
        if self._rooms[request.room].phase is Phase.WAITING:
            self._running.take_turn(request)
            self._waiting.expect(request, self._running.given_len(request))

    def _reason_to_wait(self, room: DecodeRoom, now_s: float) -> Reason | None:
        """Return what another room will soon have here of its prefix, if so much that it should not be sent again."""
        if room.phase is Phase.WAITING:
            return self._running.reason_to_wait(room.request)
        pending, until_s = self._in_flight.longest(room.request, room.peer), room.arrival_s + PATIENCE_S
        if pending is None or until_s <= now_s or not self._comes_first(pending, room):
            return None
        pays = pays_to_wait(self._cache, self._cost, room.request, pending)
        return replace(pending, until_s=until_s) if pays else None

    def _reason_without_slot(self, room: DecodeRoom) -> Reason | None:
        """Return why a room must not have memory yet, as far as adapters go."""
        if room.phase is not Phase.WAITING:
            return self._turns.reason_for_import(room.request)
        if self._turns.may_take(room.request, Rank.ALONE):
            return None
        return self._turns.reason(room.request, Rank.ALONE)

    def _comes_first(self, pending: PendingPrefix, room: DecodeRoom) -> bool:
        """Whether the other room's prompt is computed before that of `room`, by the same worker, and soon ends."""
        other = self._rooms[pending.producer.request.room]
        is_short = pending.producer.num_pages <= 2 * pending.num_pages
        return is_short and other.request.is_ready and other.request.account.priority >= room.request.account.priority

    def _admit(self, request: Request, reserve: Headroom) -> bool:
        def spare_pages(request: Request) -> int:
            importing = self._imported() if self._importing else ()
            return self._running.spare_pages(request, importing) + reserve.pages

        return self._cache.admit(request, spare_pages=spare_pages, spare_rows=reserve.rows)

    def _imported(self) -> list[Request]:
        """Return the requests whose KV is being received."""
        self._importing = [room for room in self._importing if room.phase is Phase.IMPORTING]
        return [room.request for room in self._importing]

    def _begin(self, room: DecodeRoom, now_s: float) -> list[Effect]:
        """A room has its memory."""
        self._waiting.on_admitted(room.request)
        room.granted_s = now_s
        room.stats.queue_s = room.stats.grant_s = now_s - room.arrival_s
        if room.phase is not Phase.WAITING:
            return [SendNote(room.peer, self._grant(room))]
        self._run(room)
        return []

    def _run(self, room: DecodeRoom) -> None:
        self._turns.take(room.request)
        room.on(Signal.ADMITTED)
        room.stats.cached_tokens = room.request.cached_len
        self._running.extend(room.request)

    def _grant(self, room: DecodeRoom) -> PagesReady:
        request = room.request
        room.on(Signal.GRANTED)
        self._importing.append(room)
        self._in_flight.add(request, room.peer)
        room.granted = self._cache.begin_import(request)
        room.groups = self._cache.handed(request, request.cached_len, self._cache.page_size)
        if self._cache.windows.num_groups:
            room.first_seen = self._cache.windows.live_from(request.prompt_len)
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
