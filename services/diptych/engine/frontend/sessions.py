"""Which router session gets what the scheduler says. It belongs to one event loop; the gRPC service owns the streams.

A session collects everything that is due for it in one `WorkerBatch` until its stream takes it, so a slow router gets
fewer and larger messages and never more memory than its open requests' tokens and the hashes of the cached pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from diptych.common.errors import Overloaded
from diptych.common.members.roles import Role, leg_kind
from diptych.engine.cache import kv_codec
from diptych.engine.cache.kv_feed import KvFeed, KvFeeds
from diptych.engine.scheduler.messages import tokens_said
from diptych.generation.leg_size import too_large
from diptych.v1 import bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

MAX_SESSIONS: Final = 256  # a router has one
MAX_CONTEXT_LEN: Final = 1 << 24  # before the scheduler has said more
MAX_OPEN_ROOMS: Final = 8192  # beyond what --max-waiting lets in; rooms wait for their peers, too


class Session:
    """One router's stream: its open rooms and what waits to be sent."""

    def __init__(self, feed: KvFeed | None) -> None:
        self.rooms: set[int] = set()
        self.router_id = 0  # its instance, once it has introduced itself
        self.feed = feed  # of KV events; None: they are off
        self._pending = worker_pb2.WorkerBatch()
        self._due = asyncio.Event()

    def add_output(self, output: worker_pb2.LegOutput) -> None:
        self._pending.outputs.append(output)
        self._due.set()

    def add_token(self, room: int, index: int, token_id: int) -> None:
        self._pending.outputs.add(room=room, first_index=index, token_ids=(token_id,))
        self._due.set()

    def set_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        self._pending.load.CopyFrom(load)
        self._due.set()

    def set_record(self, record: bootstrap_pb2.Instance) -> None:
        self._pending.instance.CopyFrom(record)
        self._due.set()

    def note_due(self) -> None:
        """There may be something to send in `feed`."""
        self._due.set()

    async def next_batch(self) -> worker_pb2.WorkerBatch:
        """Wait until something is due and return all of it."""
        await self._due.wait()
        self._due.clear()
        batch, self._pending = self._pending, worker_pb2.WorkerBatch()
        if self.feed is not None and (message := self.feed.pop()):
            batch.kv_events.CopyFrom(kv_codec.kv_message_to_wire(message))
            if message.more:
                self._due.set()
        return batch


class _OpenRoom(NamedTuple):
    session: Session
    begun_s: float


class Sessions:
    """All sessions of a worker, and the room -> session map."""

    def __init__(
        self,
        role: Role,
        kv_feeds: KvFeeds | None = None,
        on_success: Callable[[worker_pb2.LegStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv_feeds = kv_feeds  # None: KV events are off
        self._on_success = on_success  # called for each leg that ends well
        self._sessions: set[Session] = set()
        self._clock = clock
        self._by_room: dict[int, _OpenRoom] = {}  # oldest first
        self.idle = asyncio.Event()  # no room is open
        self.idle.set()
        self.load = bootstrap_pb2.WorkerLoad()
        self._record: bootstrap_pb2.Instance | None = None  # without its load
        self.role = role  # legs of other kinds are refused
        self.compat = ""  # of what is served; legs for something else are refused
        self.context_len = MAX_CONTEXT_LEN  # tokens, prompt and output, that the scheduler takes
        self.routers: frozenset[int] = frozenset()  # that know us: instances with a session, verified from their side
        self.closed_because = ""  # why every new leg is refused; empty: it is not

    @property
    def num_open_rooms(self) -> int:
        return len(self._by_room)

    def open(self) -> Session:
        """Begin a session. Raises `Overloaded`."""
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} routers have sessions here already")
        session = Session(self._kv_feeds.open() if self._kv_feeds else None)
        session.set_load(self.load)
        if self._record is not None:
            session.set_record(self._record)
        self._sessions.add(session)
        return session

    def close(self, session: Session) -> list[int]:
        """Forget a session; return its rooms, which nobody wants any more."""
        self._sessions.discard(session)
        self._note_routers()
        if self._kv_feeds and session.feed:
            self._kv_feeds.close(session.feed)
        for room in session.rooms:
            self._forget(room)
        return sorted(session.rooms)

    def acknowledge(self, session: Session, router_id: int) -> None:
        """A router says that it has found in us whom it looked for."""
        session.router_id = router_id
        self._note_routers()

    def start(self, session: Session, legs: Iterable[worker_pb2.StartLeg]) -> list[worker_pb2.StartLeg]:
        """Note whose rooms these are; return the acceptable ones. A room in use is answered and left alone."""
        accepted = []
        for leg in legs:
            if error := self._refuse(leg) or _refuse_move(leg, session):
                session.add_output(worker_pb2.LegOutput(room=leg.room, error=error))
                continue
            self._by_room[leg.room] = _OpenRoom(session, self._clock())
            session.rooms.add(leg.room)
            accepted.append(leg)
        if accepted:
            self.idle.clear()
        return accepted

    @property
    def oldest_s(self) -> float:
        """How long ago the oldest open room began; 0 when none is open."""
        oldest = next(iter(self._by_room.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.begun_s

    def rooms(self) -> list[int]:
        """Return every open room."""
        return list(self._by_room)

    def owned(self, session: Session, rooms: Iterable[int]) -> list[int]:
        """Return those of `rooms` that are this session's to abort."""
        return [room for room in rooms if room in session.rooms]

    def deliver(self, outputs: Iterable[worker_pb2.LegOutput]) -> None:
        for output in outputs:
            open_room = self._by_room.get(output.room)
            if open_room is None:
                continue  # its session broke; the abort is on its way
            session = open_room.session
            session.add_output(output)
            if _is_last(output):
                if not output.HasField("error"):
                    self._on_success(output.stats)
                session.rooms.discard(output.room)
                self._forget(output.room)

    def deliver_tokens(self, tokens: engine_pb2.NextTokens) -> None:
        for room, index, token_id in tokens_said(tokens):
            open_room = self._by_room.get(room)
            if open_room is not None:
                open_room.session.add_token(room, index, token_id)

    def _forget(self, room: int) -> None:
        del self._by_room[room]
        if not self._by_room:
            self.idle.set()

    def _note_routers(self) -> None:
        self.routers = frozenset(session.router_id for session in self._sessions if session.router_id)

    def _refuse(self, leg: worker_pb2.StartLeg) -> worker_pb2.LegError | None:
        """Say why a leg can't begin here; None when it can."""
        invalid, elsewhere = worker_pb2.ERROR_CODE_INVALID, worker_pb2.ERROR_CODE_HANDED_BACK
        if leg.room == 0:
            return worker_pb2.LegError(code=invalid, message="room 0 is not a room")
        if leg.room in self._by_room:
            return worker_pb2.LegError(code=invalid, message=f"room {leg.room:016x} is already in use")
        if len(self._by_room) >= MAX_OPEN_ROOMS:
            full = f"{MAX_OPEN_ROOMS} requests are open here already"
            return worker_pb2.LegError(code=worker_pb2.ERROR_CODE_OVERLOADED, message=full)
        if self.closed_because and not leg.moves_room:
            return worker_pb2.LegError(code=elsewhere, message=f"takes nothing new: {self.closed_because}")
        if leg.compat and leg.compat != self.compat:
            return worker_pb2.LegError(code=elsewhere, message="its weights have been replaced by now")
        if words := too_large(leg, self.context_len):
            return worker_pb2.LegError(code=invalid, message=words)
        return None if leg.moves_room else self._refuse_kind(leg.kind)

    def _refuse_kind(self, wire: int) -> worker_pb2.LegError | None:
        try:
            kind = leg_kind(wire, self.role)
        except ValueError as error:
            return worker_pb2.LegError(code=worker_pb2.ERROR_CODE_INVALID, message=str(error))
        if self.role.serves(kind):
            return None
        words = f"serves {self.role.value}, no {kind.value} legs"
        return worker_pb2.LegError(code=worker_pb2.ERROR_CODE_HANDED_BACK, message=words)

    def announce_kv(self, events: worker_pb2.KvEvents) -> None:
        """Tell every session of a change in the set of cached pages."""
        if self._kv_feeds:
            self._kv_feeds.add(kv_codec.delta_from_wire(events))
            for session in self._sessions:
                session.note_due()

    def resync_kv(self, session: Session) -> None:
        """Tell a session the whole set again: it has missed something."""
        if self._kv_feeds and session.feed:
            self._kv_feeds.start_again(session.feed)
            session.note_due()

    def set_record(self, instance: bootstrap_pb2.Instance) -> None:
        """Tell every session what the worker says of itself, if that changed in more than its load.

        How to link to it is for its peers only.
        """
        record = bootstrap_pb2.Instance()
        record.CopyFrom(instance)
        record.ClearField("load")
        hide_link_key(record)
        if record != self._record:
            self._record = record
            for session in self._sessions:
                session.set_record(record)

    def set_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        self.load = load
        for session in self._sessions:
            session.set_load(load)


def _refuse_move(leg: worker_pb2.StartLeg, session: Session) -> worker_pb2.LegError | None:
    """A router moves its own requests only."""
    if not leg.moves_room or leg.moves_room in session.rooms:
        return None
    words = f"room {leg.moves_room:016x} does not move: it is not open in this session"
    return worker_pb2.LegError(code=worker_pb2.ERROR_CODE_ABORTED, message=words)


def _is_last(output: worker_pb2.LegOutput) -> bool:
    return output.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED or output.HasField("error")


def hide_link_key(record: bootstrap_pb2.Instance) -> None:
    """Take out of a record what only peers are to know, who hear it from bootstrap."""
    if record.HasField("transfer"):
        record.transfer.ClearField("engine_metadata")
        record.transfer.ClearField("weights_door")
