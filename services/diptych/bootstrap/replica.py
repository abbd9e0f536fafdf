"""One bootstrap replica without its sockets and clock: heartbeats in, what each watcher has to be told out. Pure.

What changed is serialised once and put into every watcher's `Outbox`: at once, but for loads that changed alone. Those
are told to one part of the watchers after the other: all at the same moment would keep everything else waiting.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from typing import Final

from diptych.bootstrap.announcement import instance_of, load_chunk, read_heartbeat, upsert_chunk
from diptych.bootstrap.census import Census, Counts
from diptych.bootstrap.limits import Limits
from diptych.bootstrap.membership import Delta, Excuse, Heartbeat, Membership, Move, Tick
from diptych.bootstrap.mismatches import Mismatches
from diptych.bootstrap.outbox import Outbox
from diptych.bootstrap.standing import Standing
from diptych.common.errors import InvalidRequest, InvalidTransition, Overloaded
from diptych.common.instance_names import name_of
from diptych.common.membership import Record

logger = logging.getLogger(__name__)

NUM_TURNS: Final = 10


class Replica:
    """Who is alive, and who wants to know it. Call `tick` at `next_deadline_s`."""

    def __init__(self, *, lease_s: float, limits: Limits) -> None:
        self._limits = limits
        self._lease_ms = round(lease_s * 1000)
        self._membership: Membership[bytes] = Membership(lease_s=lease_s, max_instances=limits.max_instances)
        self._watchers: dict[Outbox, int | None] = {}  # whose turn to hear of loads is when; None: never
        self._turns = itertools.cycle(range(NUM_TURNS))
        self._places = itertools.cycle(range(NUM_TURNS))
        self._new_loads: dict[int, Record[bytes]] = {}  # since the last turn
        self._loads: deque[dict[int, bytes]] = deque(maxlen=NUM_TURNS)  # of each turn, as WatchUpdates
        self._mismatches = Mismatches()
        self._counts = Counts()

    @property
    def next_deadline_s(self) -> float | None:
        """When a `tick` is next due; what comes up later is due a lease after it came up."""
        return self._membership.next_deadline_s

    def hear(self, data: bytes, now_s: float) -> Delta[bytes]:
        """Take a heartbeat as it came. Raises `InvalidRequest` and `Overloaded`, changing nothing."""
        try:
            delta = self._membership.apply(Heartbeat(read_heartbeat(data)), now_s)
        except (InvalidRequest, Overloaded):
            self._counts.refused += 1
            raise
        except InvalidTransition as error:
            self._counts.refused += 1
            raise InvalidRequest(str(error)) from None
        self._counts.heartbeats += 1
        return self._tell(delta)

    def tick(self, now_s: float) -> Delta[bytes]:
        return self._tell(self._membership.apply(Tick(), now_s))

    def excuse(self, now_s: float) -> None:
        """Give everybody that is listed a fresh lease: nobody could be heard."""
        self._membership.apply(Excuse(), now_s)

    def tell_loads(self) -> list[Outbox]:
        """Tell those whose turn it is how busy everybody is whose load changed since their last one; return them."""
        self._loads.append({instance_id: load_chunk(record) for instance_id, record in self._new_loads.items()})
        self._new_loads.clear()
        turn = next(self._turns)
        told = [outbox for outbox, place in self._watchers.items() if place == turn]
        for outbox, loads in itertools.product(told, self._loads):
            outbox.put_loads(loads)
        return told

    def open(self, *, with_loads: bool) -> Outbox:
        """Return the outbox of another watcher. Raises `Overloaded`."""
        if len(self._watchers) >= self._limits.max_watchers:
            raise Overloaded(f"{self._limits.max_watchers} watchers are served: no more fit (--max-watchers)")
        outbox = Outbox(self._lease_ms)
        self._watchers[outbox] = next(self._places) if with_loads else None
        return outbox

    def close(self, outbox: Outbox) -> None:
        del self._watchers[outbox]

    def take(self, outbox: Outbox) -> bytes:
        """Return what a watcher has to be told, as a WatchUpdate."""
        wants_loads = self._watchers[outbox] is not None
        return outbox.take(self._everything if wants_loads else self._everything_but_loads)

    def census(self) -> Census:
        return Census(self._counts, self._membership.snapshot(), len(self._watchers))

    def _everything(self) -> Iterator[bytes]:
        return map(upsert_chunk, self._membership.snapshot())

    def _everything_but_loads(self) -> Iterator[bytes]:
        return (upsert_chunk(dataclasses.replace(record, load=b"")) for record in self._membership.snapshot())

    def _tell(self, delta: Delta[bytes]) -> Delta[bytes]:
        self._new_loads.update((record.instance_id, record) for record in delta.loads)
        if delta.is_news:
            chunks = {record.instance_id: upsert_chunk(record) for record in delta.upserts}
            for outbox in self._watchers:
                outbox.put(chunks, delta.removed, delta.ended)
            self._note(delta)
        return delta

    def _note(self, delta: Delta[bytes]) -> None:
        for move in delta.moves:
            self._counts.moves[move.after] += 1
            _log_move(move)
        for record in delta.upserts:
            for words in self._mismatches.put(instance_of(record)):
                self._counts.mismatches += 1
                logger.warning("%s", words)
        for instance_id in (*delta.removed, *delta.ended):
            self._mismatches.drop(instance_id)
            self._new_loads.pop(instance_id, None)


def _log_move(move: Move[bytes]) -> None:
    level = logging.WARNING if move.after in (Standing.EXPIRED, Standing.EVICTED) else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s is %s", name_of(instance_of(move.record)), move.after.value)
