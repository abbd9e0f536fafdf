"""The links of one scheduler to its peers, as its loop needs them: effects become transfers, and transfers events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Final, Protocol

from diptych.engine.events import Event, NoteArrived, SendNote, WriteDone, WritePages, WriterGone
from diptych.engine.runtime.link_tester import LinkTester
from diptych.engine.runtime.linking import Linking
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote, TransferError, TransferQueueFull
from diptych.kvtransfer.transport import NoteReceived, OpDone, PageWrite, Transport, TransportEvent
from diptych.v1 import worker_pb2

logger = logging.getLogger(__name__)

SUSPECT_CHECK_S: Final = 0.2  # between looks whether a lost peer can still write


class PeerLinks(Protocol):
    """What the scheduler's loop needs of its links."""

    @property
    def linked(self) -> Set[int]: ...

    @property
    def problem(self) -> str:
        """Why no peer is linked although there are some; empty when one is."""
        ...

    @property
    def num_pages_sent(self) -> int: ...

    @property
    def num_failures(self) -> int:
        """Links that broke, since start."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether `poll` has something to say although no descriptor is readable."""
        ...

    def descriptors(self) -> Sequence[int]:
        """File descriptors that are readable while `poll` has transfer events."""
        ...

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None: ...

    def reconnect(self, now_s: float) -> None: ...

    def next_retry_s(self) -> float | None: ...

    def perform(self, effect: WritePages | SendNote) -> None: ...

    def poll(self, suspects: set[int]) -> list[Event]: ...

    def status(self) -> list[worker_pb2.LinkStatus]:
        """Describe every link, for operators."""
        ...

    def close(self) -> None: ...


class NoLinks:
    """The links of an engine that has no peers."""

    linked: Set[int] = frozenset()
    problem = ""
    num_pages_sent = 0
    num_failures = 0
    has_events = False

    def descriptors(self) -> Sequence[int]:
        return ()

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None:
        raise AssertionError("an aggregated engine has no peers")

    def reconnect(self, now_s: float) -> None:
        pass

    def next_retry_s(self) -> float | None:
        return None

    def perform(self, effect: WritePages | SendNote) -> None:
        raise AssertionError(f"an aggregated engine has no peers, yet its core wants {effect}")

    def poll(self, suspects: set[int]) -> list[Event]:
        return []

    def status(self) -> list[worker_pb2.LinkStatus]:
        return []

    def close(self) -> None:
        pass


class Links:
    """Owns the transport of a scheduler process. All calls from the scheduler's thread."""

    def __init__(self, transport: Transport, tester: LinkTester) -> None:
        self._transport = transport
        self._linking = Linking(transport, tester)
        self._rooms: dict[int, int] = {}  # operation -> room
        self._queue: deque[WritePages | SendNote] = deque()  # effects that wait for the transfer engine
        self._events: list[Event] = []
        self.num_pages_sent = 0

    @property
    def linked(self) -> Set[int]:
        return self._linking.up

    @property
    def problem(self) -> str:
        return self._linking.problem

    @property
    def num_failures(self) -> int:
        return self._linking.num_failures

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def descriptors(self) -> Sequence[int]:
        return (self._transport.fileno(),)

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None:
        """Bring the links to `members`: connect new ones, close those that are no member any more."""
        self._linking.set_peers(members, now_s)

    def reconnect(self, now_s: float) -> None:
        """Link to members that have no link. Call before `poll`."""
        self._linking.reconnect(now_s)

    def next_retry_s(self) -> float | None:
        """When `reconnect` has something to do."""
        return self._linking.next_retry_s()

    def perform(self, effect: WritePages | SendNote) -> None:
        self._queue.append(effect)
        self._post_queued()

    def poll(self, suspects: set[int]) -> list[Event]:
        """Return what happened since the last call, without waiting."""
        for event in self._transport.poll():
            self._take(event)
        self._post_queued()
        self._events.extend(WriterGone(peer) for peer in suspects if self._transport.writer_gone(peer))
        events, self._events = self._events, []
        return events

    def status(self) -> list[worker_pb2.LinkStatus]:
        return self._linking.status()

    def close(self) -> None:
        self._transport.close()

    def _take(self, event: TransportEvent) -> None:
        if self._linking.take(event):
            self._events += self._linking.take_events()
            return
        match event:
            case NoteReceived(peer, data):
                self._take_note(peer, data)
            case OpDone(op, error):
                room = self._rooms.pop(op, None)
                if room is not None:
                    self._events.append(WriteDone(room, error))

    def _take_note(self, peer: int, data: bytes) -> None:
        try:
            note = note_codec.decode(data, sender=peer, target=self._transport.instance_id)
        except MalformedNote as error:
            logger.error("dropped a note from %016x: %s", peer, error)
            return
        self._events.append(NoteArrived(peer, note))

    def _post_queued(self) -> None:
        while self._queue:
            try:
                self._post(self._queue[0])
            except TransferQueueFull:
                return  # completions make room, and bring us here again
            except TransferError as error:
                self._refuse(self._queue[0], str(error))
            self._queue.popleft()

    def _post(self, effect: WritePages | SendNote) -> None:
        note = b""
        if effect.note is not None:
            note = note_codec.encode(effect.note, sender=self._transport.instance_id, target=effect.peer)
        match effect:
            case WritePages():
                op = self._transport.write_pages(effect.peer, PageWrite(effect.src, effect.dst), note)
                self._rooms[op] = effect.room
                self.num_pages_sent += len(effect.dst)
            case SendNote():
                self._transport.send_note(effect.peer, note)

    def _refuse(self, effect: WritePages | SendNote, reason: str) -> None:
        if isinstance(effect, WritePages):
            self._events.append(WriteDone(effect.room, reason))
        else:
            logger.info("note to %016x not sent: %s", effect.peer, reason)
