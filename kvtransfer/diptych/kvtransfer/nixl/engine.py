"""The thread that makes every call of NIXL, and sleeps between.

NIXL's Python API has no descriptor to wait on: things move only while somebody polls. So the thread polls, and sleeps
longer the longer nothing happened: from 50 us up to `MAX_PAUSE_S`, which is what a message may wait on an idle engine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Final

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.conversation import Conversation, Down, Frame, Heard, Note, Up, decode_frame, is_authentic
from diptych.kvtransfer.errors import MalformedNote, TransferError
from diptych.kvtransfer.event_queue import EventQueue
from diptych.kvtransfer.metadata import EngineMetadata
from diptych.kvtransfer.nixl.agent import Agent
from diptych.kvtransfer.nixl.link import Link
from diptych.kvtransfer.nixl.memory import Memory, Staging
from diptych.kvtransfer.pool import OwnWork
from diptych.kvtransfer.transport import InstanceId, LinkDown, LinkUp, NoteReceived, OpDone
from diptych.kvtransfer.ucx.options import LinkOptions

logger = logging.getLogger(__name__)

MIN_PAUSE_S: Final = 50e-6
MAX_PAUSE_S: Final = 2e-3
GREETING_S: Final = 0.02  # between heartbeats until a link is up
GOODBYE_S: Final = 0.02  # for the goodbye to leave before the connection is closed


@dataclass(frozen=True, slots=True)
class NixlOptions(LinkOptions):
    """Options of `NixlTransport`."""


class Engine:
    """Other threads only call what says so."""

    def __init__(
        self,
        instance_id: InstanceId,
        link_key: bytes,
        agent: Agent,
        memory: Memory,
        options: NixlOptions,
        events: EventQueue,
    ) -> None:
        self.lock = Lock()  # of what links accept
        self.num_dropped = 0  # frames that belonged to no link
        self.num_unauthenticated = 0  # frames without our key
        self._instance_id = instance_id
        self._link_key = link_key
        self._agent = agent
        self._memory = memory
        self._options = options
        self._events = events
        self._links: dict[InstanceId, Link] = {}
        self._sessions: dict[InstanceId, int] = {}  # of peers, in their last link
        self._num_sessions = 0
        self._tasks: deque[Callable[[], None]] = deque()
        self._stagings: dict[PagePack, Staging] = {}  # shared by links
        self._own_work: deque[OwnWork] = deque()
        self._woken = Event()
        self._is_stopping = False
        self._thread = Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def perform(self, task: Callable[[], None]) -> None:
        """Have the thread do something soon. Any thread. Raises `TransferError` when it has failed."""
        if self._is_stopping:
            raise TransferError("the NIXL engine has ended; its log says why")
        self._tasks.append(task)
        self._woken.set()

    def wake(self) -> None:
        """Any thread."""
        self._woken.set()

    def stop(self) -> None:
        """Say goodbye to all peers and end the thread. Any other thread."""
        self._is_stopping = True
        self._woken.set()
        self._thread.join()

    def open(
        self, peer: InstanceId, metadata: EngineMetadata, packs: Sequence[PagePack], opened: Callable[[Link], None]
    ) -> None:
        """Begin a link. On the thread."""
        now_ns = time.monotonic_ns()
        self._num_sessions += 1
        conversation = Conversation(
            self._instance_id,
            peer,
            self._num_sessions,
            former_session=self._sessions.get(peer, 0),
            window=self._options.max_waiting_notes,
            now_ns=now_ns,
        )
        link = Link(
            peer, metadata, conversation, self._agent, self._memory, "", now_ns, self._events.push, self._staging
        )
        self._links[peer] = link
        opened(link)
        try:
            for pack in packs:
                link.stage(pack)
            link.name = self._agent.add(metadata.worker_address)
        except TransferError as error:
            link.is_removed = True
            self._begin_to_close(link, str(error), now_ns)

    def _staging(self, pack: PagePack) -> Staging:
        if pack not in self._stagings:
            self._stagings[pack] = Staging(self._agent, self._memory, pack)
        return self._stagings[pack]

    def begin(self, work: OwnWork) -> None:
        """Do something with our pages, between other work. On the thread."""
        self._own_work.append(work)

    def close(self, peer: InstanceId, reason: str) -> None:
        """End a link. On the thread."""
        link = self._links.get(peer)
        if link is not None and link.closing is None:
            self._begin_to_close(link, reason, time.monotonic_ns())

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("the NIXL engine failed")
            self._is_stopping = True
            for link in list(self._links.values()):
                self._report(link, f"the NIXL engine failed: {error}")

    def _serve(self) -> None:
        pause_s = MIN_PAUSE_S
        while not self._is_stopping:
            was_busy = self._turn()
            pause_s = MIN_PAUSE_S if was_busy else min(pause_s * 1.5, MAX_PAUSE_S)
            self._woken.wait(pause_s)
        for link in list(self._links.values()):
            self.close(link.peer, "closed")
        until = time.monotonic() + self._options.connect_s
        while self._links and time.monotonic() < until:
            self._turn()
            self._woken.wait(MIN_PAUSE_S)

    def _turn(self) -> bool:
        """Do all that can be done now; return whether there was anything."""
        self._woken.clear()
        busy = bool(self._tasks)
        while self._tasks:
            self._tasks.popleft()()
        busy |= self._receive()
        now_ns = time.monotonic_ns()
        for link in list(self._links.values()):
            busy |= self._advance(link, now_ns)
        if self._own_work:
            self._go_on(self._own_work[0])
        return busy or bool(self._own_work)

    def _go_on(self, work: OwnWork) -> None:
        if work.go_on(self._memory.pool):
            self._own_work.popleft()
            self._events.push(OpDone(work.operation, None, work.digest))

    def _receive(self) -> bool:
        received = self._agent.receive()
        now_ns = time.monotonic_ns()
        for data in received:
            self._receive_bytes(data, now_ns)
        return bool(received)

    def _receive_bytes(self, data: bytes, now_ns: int) -> None:
        if not is_authentic(data, self._link_key):
            self.num_unauthenticated += 1
            return
        try:
            self._receive_frame(decode_frame(data), now_ns)
        except MalformedNote as error:
            logger.warning("dropped a notification: %s", error)

    def _receive_frame(self, frame: Frame, now_ns: int) -> None:
        link = self._links.get(frame.source)
        if link is None or link.closing is not None or frame.target != self._instance_id:
            self.num_dropped += 1
            return
        heard = link.conversation.receive(frame, now_ns)
        if heard is None:
            self.num_dropped += 1
            return
        for each in heard:
            self._obey(link, each, now_ns)

    def _obey(self, link: Link, heard: Heard, now_ns: int) -> None:
        match heard:
            case Up():
                with self.lock:
                    link.is_accepting = True
                self._events.push(LinkUp(link.peer))
                link.next_beat_ns = now_ns  # the peer learns at once that its words arrive
            case Down(reason):
                self._begin_to_close(link, reason, now_ns)
            case Note(data, digest):
                self._events.push(NoteReceived(link.peer, data, digest), link.note_polled)

    def _advance(self, link: Link, now_ns: int) -> bool:
        if link.closing is not None:
            return self._close(link, now_ns)
        try:
            self._beat(link, now_ns)
            busy = link.advance(now_ns / 1e9)
        except TransferError as error:
            self._begin_to_close(link, str(error), now_ns)
            return True
        reason = self._lost(link, now_ns)
        if reason is not None:
            self._begin_to_close(link, reason, now_ns)
        return busy or bool(link.in_flight)

    def _beat(self, link: Link, now_ns: int) -> None:
        talk = link.conversation
        if now_ns >= link.next_beat_ns or talk.peer_should_know:
            link.send(talk.beat(now_ns))
            pause_s = self._options.heartbeat_s if talk.is_up else min(GREETING_S, self._options.heartbeat_s)
            link.next_beat_ns = now_ns + int(pause_s * 1e9)

    def _lost(self, link: Link, now_ns: int) -> str | None:
        talk, options = link.conversation, self._options
        if not talk.is_up:
            late = now_ns - link.began_ns > options.connect_s * 1e9
            return f"no link within {options.connect_s:g} s" if late else None
        silence_s = (now_ns - talk.heard_ns) / 1e9
        silent = silence_s > options.heartbeat_s * options.heartbeat_misses
        return f"the peer was silent for {silence_s:.1f} s" if silent else None

    def _begin_to_close(self, link: Link, reason: str, now_ns: int) -> None:
        with self.lock:
            link.is_accepting = False
        link.closing, link.closing_since_ns = reason, now_ns
        with contextlib.suppress(TransferError):  # it may hear nothing any more
            link.send(link.conversation.bye())

    def _close(self, link: Link, now_ns: int) -> bool:
        """Let what was posted end (unless the peer is silent) and the goodbye leave, close the connection, report."""
        has_ended = link.drop()
        is_over = has_ended or self._lost(link, now_ns) is not None
        if not link.is_removed and is_over and now_ns - link.closing_since_ns > GOODBYE_S * 1e9:
            link.remove()
        if not link.is_removed or not has_ended:
            return False
        link.release()
        assert link.closing is not None
        self._report(link, link.closing)
        return True

    def _report(self, link: Link, reason: str) -> None:
        """Say that a link and all of its operations have ended."""
        with self.lock:
            link.is_accepting = False
        del self._links[link.peer]
        self._sessions[link.peer] = max(link.conversation.peer_session, self._sessions.get(link.peer, 0))
        for operation in (*link.streams.all(), *link.submitted):
            self._events.push(OpDone(operation.name, reason))
        self._events.push(LinkDown(link.peer, reason))
