"""Requests that leave for another worker while they run: held, given to who sends their KV, then let go or taken back.

A held request is in no further step; once no launched step has it, its pages can go to `as_prompt` of it. Its room
stays open here meanwhile, without pages, and may end for any reason: then nobody takes back what was given away.
"""

from __future__ import annotations

from diptych.decode.phases import Phase, Signal
from diptych.decode.rooms import Rooms
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.running import Running
from diptych.engine.values.request import Request
from diptych.generation.output import MOVED, Output


class Leaving:
    """What has ended is answered by `rooms`."""

    def __init__(self, cache: KvCache, running: Running, rooms: Rooms) -> None:
        self._cache = cache
        self._running = running
        self._rooms = rooms

    def refuse(self, room_id: int, peer: int) -> str | None:
        """Say why a request can't go on at a peer now; None when it can."""
        if self._cache.pages_per_state:
            return "its model keeps a recurrent state, which is in no pages while it runs"
        if room_id not in self._rooms:
            return f"room {room_id:016x} is not open here"
        request = self._rooms[room_id].request
        if not self._running.has(request) or request.num_output_tokens < 1:
            return "it does not make output now"
        return None if peer in self._rooms.linked else f"no link to worker {peer:016x}"

    def hold(self, room_id: int) -> None:
        """Let no further step continue a request that was not refused."""
        self._running.hold(self._rooms[room_id].request)

    def release(self, room_id: int, now_s: float) -> None:
        """Let a request that is held, if it has not ended, run on."""
        if room_id in self._rooms:
            self._running.release(self._rooms[room_id].request, now_s)

    def is_still(self, room_id: int) -> bool:
        """Whether no launched step has a request that is held, or it has ended."""
        return room_id not in self._rooms or self._running.is_still(self._rooms[room_id].request)

    def give_away(self, room_id: int, new_room: int) -> Request | None:
        """Return a request that is still, as a prompt that holds all it held; None if it has ended."""
        if room_id not in self._rooms:
            return None
        room = self._rooms[room_id]
        heir = as_prompt(room.request, new_room)
        self._running.give_away(room.request)
        self._cache.pass_on(room.request, heir)
        room.on(Signal.GIVEN_AWAY)
        return heir

    def let_go(self, room_id: int, heir: Request) -> None:
        """Another worker goes on with a request: keep its KV as a cached prefix, and end its room if that is open."""
        self._cache.retire(heir)
        if self._is_away(room_id):
            self._rooms.end(self._rooms[room_id], Output(room_id, failure=MOVED))

    def take_back(self, room_id: int, heir: Request, now_s: float) -> None:
        """No other worker goes on with a request: it runs on here if its room is open."""
        if not self._is_away(room_id):
            self._cache.retire(heir)
            return
        room = self._rooms[room_id]
        self._cache.pass_on(heir, room.request)
        room.on(Signal.TAKEN_BACK)
        self._running.join(room.request, now_s)

    def _is_away(self, room_id: int) -> bool:
        return room_id in self._rooms and self._rooms[room_id].phase is Phase.MOVING


def as_prompt(request: Request, room: int) -> Request:
    """Return a request that runs as a prompt that is computed but for its newest token. It holds nothing yet."""
    prompt_len = request.num_tokens - 1
    return Request(
        room=room,
        params=request.params,
        account=request.account,
        hints=request.hints,
        life=request.life,
        slo=request.slo,
        extra_key=request.extra_key,
        tokens=request.tokens,
        prompt_len=prompt_len,
        num_tokens=prompt_len,
        max_len=request.max_len,
        given_len=prompt_len,
        adapter=request.adapter,
        adapter_slot=request.adapter_slot,
        contents=request.contents,
    )
