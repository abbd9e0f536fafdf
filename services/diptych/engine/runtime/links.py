"""The links of one scheduler to its peers: keeps them to what membership says, and turns effects into transfers.

Membership is level-triggered: `set_peers` gives the whole set, and every link is brought towards it, so neither a
lost update nor a broken link strands a peer that is still a member.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from diptych.engine.events import Event, NoteArrived, PeerDown, PeerUp, SendNote, WriteDone, WritePages, WriterGone
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote, TransferError, TransferQueueFull
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, Transport, TransportEvent

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.5  # between attempts to reach a member whose link is down
SUSPECT_CHECK_S: Final = 0.2  # between looks whether a lost peer can still write


class PeerLinks(Protocol):
    """What the scheduler's loop needs of its links."""

    @property
    def linked(self) -> set[int]: ...

    @property
    def num_pages_sent(self) -> int: ...

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

    def close(self) -> None: ...


class NoLinks:
    """The links of an engine that has no peers."""

    num_pages_sent = 0
    has_events = False

    @property
    def linked(self) -> set[int]:
        return set()

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

    def close(self) -> None:
        pass


class Links:
    """Owns the transport of a scheduler process. All calls from the scheduler's thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._members: Mapping[int, bytes] = {}  # instance id -> transfer metadata
        self._opened: set[int] = set()  # links that are up or coming up
        self._linked: set[int] = set()
        self._retry_s: dict[int, float] = {}  # members whose link failed -> when to try again
        self._now_s = 0.0
        self._rooms: dict[int, int] = {}  # operation -> room
        self._queue: deque[WritePages | SendNote] = deque()  # effects that wait for the transfer engine
        self._events: list[Event] = []
        self.num_pages_sent = 0

    @property
    def linked(self) -> set[int]:
        return set(self._linked)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def descriptors(self) -> Sequence[int]:
        return (self._transport.fileno(),)

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None:
        """Bring the links to `members`: connect new ones, close those that are no member any more."""
        for peer in self._opened - members.keys():
            self._transport.disconnect(peer)
        self._members = members
        self._retry_s = {peer: at_s for peer, at_s in self._retry_s.items() if peer in members}
        self.reconnect(now_s)

    def reconnect(self, now_s: float) -> None:
        """Link to members that have no link, again `RECONNECT_S` after each failure. Call before `poll`."""
        self._now_s = now_s
        for peer in self._members.keys() - self._opened:
            if self._retry_s.get(peer, now_s) <= now_s:
                self._connect(peer)

    def next_retry_s(self) -> float | None:
        """When `reconnect` has something to do; None when every member is linked or never can be."""
        times = [at_s for peer, at_s in self._retry_s.items() if peer not in self._opened]
        return min((at_s for at_s in times if at_s != math.inf), default=None)

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

    def close(self) -> None:
        self._transport.close()

    def _connect(self, peer: int) -> None:
        try:
            self._transport.connect(peer, self._members[peer])
        except TransferError as error:
            logger.error("can't ever link to %016x: %s", peer, error)
            self._retry_s[peer] = math.inf  # its metadata is bad or doesn't fit ours, and stays so
            return
        self._opened.add(peer)

    def _take(self, event: TransportEvent) -> None:
        match event:
            case LinkUp(peer):
                logger.info("linked to %016x: %s", peer, self._transport.describe(peer))
                self._linked.add(peer)
                self._events.append(PeerUp(peer))
            case LinkDown(peer, reason):
                logger.warning("link to %016x is down: %s", peer, reason)
                self._linked.discard(peer)
                self._opened.discard(peer)
                if peer in self._members:
                    self._retry_s[peer] = self._now_s + RECONNECT_S
                self._events.append(PeerDown(peer, reason))
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
                op = self._transport.write_pages(effect.peer, effect.src, effect.dst, note)
                self._rooms[op] = effect.room
                self.num_pages_sent += len(effect.src)
            case SendNote():
                self._transport.send_note(effect.peer, note)

    def _refuse(self, effect: WritePages | SendNote, reason: str) -> None:
        if isinstance(effect, WritePages):
            self._events.append(WriteDone(effect.room, reason))
        else:
            logger.info("note to %016x not sent: %s", effect.peer, reason)
