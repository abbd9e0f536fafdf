"""Which router session gets what the scheduler says. Pure bookkeeping; the gRPC service owns the streams.

A session collects everything that is due for it in one `WorkerBatch` until its stream takes it, so a slow router gets
fewer and larger messages and never more memory than its open requests' tokens and the hashes of the cached pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from diptych.engine.kv_feed import KvFeed, KvFeeds
from diptych.engine.runtime import codec
from diptych.v1 import bootstrap_pb2, inference_pb2, worker_pb2


class Session:
    """One router's stream: its open rooms and what waits to be sent."""

    def __init__(self, feed: KvFeed | None) -> None:
        self.rooms: set[int] = set()
        self.feed = feed  # of KV events; None: they are off
        self._pending = worker_pb2.WorkerBatch()
        self._due = asyncio.Event()

    def add_output(self, output: worker_pb2.LegOutput) -> None:
        self._pending.outputs.append(output)
        self._due.set()

    def set_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        self._pending.load.CopyFrom(load)
        self._due.set()

    def note_due(self) -> None:
        """There may be something to send in `feed`."""
        self._due.set()

    async def take(self) -> worker_pb2.WorkerBatch:
        """Wait until something is due and take all of it."""
        await self._due.wait()
        self._due.clear()
        batch, self._pending = self._pending, worker_pb2.WorkerBatch()
        if self.feed is not None and (message := self.feed.take()):
            batch.kv_events.CopyFrom(codec.kv_message_to_wire(message))
            if message.more:
                self._due.set()
        return batch


class Sessions:
    """All sessions of a worker, and the room -> session map."""

    def __init__(
        self, kv_feeds: KvFeeds | None = None, on_success: Callable[[worker_pb2.LegStats], None] = lambda stats: None
    ) -> None:
        self._kv_feeds = kv_feeds  # None: KV events are off
        self._on_success = on_success  # called for each leg that ends well
        self._sessions: set[Session] = set()
        self._by_room: dict[int, Session] = {}
        self._load = bootstrap_pb2.WorkerLoad()
        self.compat = ""  # of what is served; legs for something else are refused
        self.closed_because = ""  # why every new leg is refused; empty: it is not

    @property
    def load(self) -> bootstrap_pb2.WorkerLoad:
        return self._load

    @property
    def num_open_rooms(self) -> int:
        return len(self._by_room)

    def open(self) -> Session:
        session = Session(self._kv_feeds.open() if self._kv_feeds else None)
        session.set_load(self._load)
        self._sessions.add(session)
        return session

    def close(self, session: Session) -> list[int]:
        """Forget a session; return its rooms, which nobody wants any more."""
        self._sessions.discard(session)
        if self._kv_feeds and session.feed:
            self._kv_feeds.close(session.feed)
        for room in session.rooms:
            del self._by_room[room]
        return sorted(session.rooms)

    def start(self, session: Session, legs: Iterable[worker_pb2.StartLeg]) -> list[worker_pb2.StartLeg]:
        """Note whose rooms these are; return the acceptable ones. A room in use is answered and left alone."""
        accepted = []
        for leg in legs:
            if error := self._refuse(leg):
                session.add_output(worker_pb2.LegOutput(room=leg.room, error=error))
                continue
            self._by_room[leg.room] = session
            session.rooms.add(leg.room)
            accepted.append(leg)
        return accepted

    def rooms(self) -> list[int]:
        """Return every open room."""
        return list(self._by_room)

    def owned(self, session: Session, rooms: Iterable[int]) -> list[int]:
        """Return those of `rooms` that are this session's to abort."""
        return [room for room in rooms if room in session.rooms]

    def deliver(self, outputs: Iterable[worker_pb2.LegOutput]) -> None:
        for output in outputs:
            session = self._by_room.get(output.room)
            if session is None:
                continue  # its session broke; the abort is on its way
            session.add_output(output)
            if _is_last(output):
                if not output.HasField("error"):
                    self._on_success(output.stats)
                session.rooms.discard(output.room)
                del self._by_room[output.room]

    def _refuse(self, leg: worker_pb2.StartLeg) -> worker_pb2.LegError | None:
        """Say why a leg can't begin here; None when it can."""
        invalid, overloaded = worker_pb2.ERROR_CODE_INVALID, worker_pb2.ERROR_CODE_OVERLOADED
        if leg.room == 0:
            return worker_pb2.LegError(code=invalid, message="room 0 is not a room")
        if leg.room in self._by_room:
            return worker_pb2.LegError(code=invalid, message=f"room {leg.room:016x} is already in use")
        if self.closed_because:
            return worker_pb2.LegError(code=overloaded, message=f"takes nothing new: {self.closed_because}")
        if leg.compat and leg.compat != self.compat:
            return worker_pb2.LegError(code=overloaded, message="its weights have been replaced by now")
        return None

    def tell_kv(self, events: worker_pb2.KvEvents) -> None:
        """Tell every session of a change in the set of cached pages."""
        if self._kv_feeds:
            self._kv_feeds.add(codec.delta_from_wire(events))
            for session in self._sessions:
                session.note_due()

    def resync_kv(self, session: Session) -> None:
        """Tell a session the whole set again: it has missed something."""
        if self._kv_feeds and session.feed:
            self._kv_feeds.start_again(session.feed)
            session.note_due()

    def set_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        self._load = load
        for session in self._sessions:
            session.set_load(load)


def _is_last(output: worker_pb2.LegOutput) -> bool:
    return output.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED or output.HasField("error")
