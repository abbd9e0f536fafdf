"""Histories that are offered to who computes the next turn, while their sessions wait for a tool: the giver's side.

A session mostly goes on where its prompt was computed, and that worker lacks the output. While the tool runs, it may
pull that, and all else of the text that it has lost, under the number of an offer as `giving` makes them. So nothing
has to come when the session returns, and what comes does so beside the steps.

What is offered is what `sessions` keeps: its return is likely enough, soon enough, to be worth the memory here. How
long a return takes, with those that never come, is told as the time that the text was not wanted; a taker gives up
nothing for it that was wanted since. Bounded: `MAX_OFFERED` texts to a peer at a time, `MAX_WAITING` that wait for
that; one whose time is as good as over is forgotten, and a peer that refuses gets no more for a while. Whatever goes
wrong costs what there was without it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.sessions import Left
from diptych.engine.values.core_report import CoreCounts, CoreReport, Holders
from diptych.engine.values.events import Effect, SendNote
from diptych.kvtransfer.notes import OfferEnded
from diptych.unified.giving import is_here, offer_of

MAX_OFFERED: Final = 4  # to one peer at a time
MAX_WAITING: Final = 64
LEAST_S: Final = 1.0  # a pull that has less time hardly comes before its session
REFUSED_S: Final = 60.0  # that a peer which takes none gets none: its KV is another's, say, which weights can change
_ID_MASK: Final = 0x3C7A_1E55_D20B_9648


def ahead_id(room: int) -> int:
    """Return the number of the offer of what a request has left: no room, and no pull of that request."""
    return (room ^ _ID_MASK) or 1


def caller(number: int) -> int:
    """Return the room of the request whose text is offered under a number, if that is such a number."""
    return number ^ _ID_MASK


class Ahead:
    """What it has to say goes to `effects`."""

    def __init__(self, cache: KvCache, effects: list[Effect], *, is_on: bool) -> None:
        self._cache = cache
        self._effects = effects
        self._is_on = is_on and not cache.pages_per_state
        self._waiting: deque[Left] = deque(maxlen=MAX_WAITING)
        self._offered: dict[int, Left] = {}  # by number, until it is answered
        self._linked: set[int] = set()
        self._refused: dict[int, float] = {}  # until when peers get no offers, as they took none
        self._counts = CoreCounts()

    def has(self, number: int) -> bool:
        return number in self._offered

    def look(self, now_s: float) -> None:
        """Offer what sessions have left since."""
        left = self._cache.sessions.left
        if self._is_on:
            self._waiting.extend(left)
        left.clear()
        self._go_on(now_s)

    def peer_up(self, peer: int) -> None:
        self._linked.add(peer)
        self._refused.pop(peer, None)

    def peer_down(self, peer: int, now_s: float) -> None:
        self._linked.discard(peer)
        self._refused.pop(peer, None)
        self._offered = {number: each for number, each in self._offered.items() if each.computed_by != peer}
        self._go_on(now_s)

    def on_ended(self, peer: int, note: OfferEnded, now_s: float) -> None:
        """A peer says what came of an offer; nothing is offered twice."""
        if self._offered[note.room].computed_by == peer:
            del self._offered[note.room]
            self._counts.pages_given += note.num_pages
            if note.outcome == "refused":
                self._refused[peer] = now_s + REFUSED_S
            self._go_on(now_s)

    def report(self) -> CoreReport:
        """Return what it has counted. Nobody waits for it, and its pages are the tree's."""
        return CoreReport(0, Holders(), self._counts)

    def _go_on(self, now_s: float) -> None:
        self._offered = {number: each for number, each in self._offered.items() if each.until_s > now_s}
        busy = [each.computed_by for each in self._offered.values()]
        for left in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            if not self._is_worth_offering(left, now_s):
                continue
            if busy.count(left.computed_by) >= MAX_OFFERED:
                self._waiting.append(left)
            else:
                busy.append(left.computed_by)
                self._offer(left, now_s)

    def _is_worth_offering(self, left: Left, now_s: float) -> bool:
        peer = left.computed_by
        takes = peer in self._linked and now_s >= self._refused.get(peer, -math.inf)
        return takes and left.until_s >= now_s + LEAST_S and is_here(left.node)

    def _offer(self, left: Left, now_s: float) -> None:
        number = ahead_id(left.room)
        self._offered[number] = left
        offer = offer_of(self._cache, left.node, number, idle_s=left.wait_s, within_s=left.until_s - now_s)
        self._effects.append(SendNote(left.computed_by, offer))
