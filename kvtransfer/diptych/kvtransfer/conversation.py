"""One end of a link, as far as it is words: sessions, the order of notes, and room for them.

Pure: frames in, events out. NIXL's links and those inside a process speak so. UCX's do the same in C, on messages of
their own (`ucx/shim/link`).

A frame begins with the link key of its target: nothing of one without it is believed. It names its sender and its
target, by instance and by session, so that one for a former instance or a former link is recognised. Frames of notes
are numbered, for not every library promises an order; a long note may be several of them.

A link is up when the peer names our own session: then both directions work. A peer that names a higher session of its
own than before began anew, so its end of this link is closed. Notes are taken in the order of their numbers. A peer may
be `window` notes ahead of what was polled here; nothing is sent beyond that.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.metadata import LINK_KEY_NBYTES
from diptych.kvtransfer.transport import InstanceId

PART_NBYTES: Final = 512 << 10  # of a note; heartbeats go between
VERSION: Final = 2
_HEADER: Final = struct.Struct("<BB?x4x10Q")


class Kind(enum.IntEnum):
    """What a frame is."""

    BEAT = 1
    BYE = 2
    PART = 3  # of a note; more follows
    NOTE = 4  # all of a note, or its last part


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    source: InstanceId
    target: InstanceId
    session: int  # of the sender's link; later ones are higher
    peer_session: int  # of the target's, as far as the sender knows it; 0: not yet
    number: int = 0  # of a part or note, from 1
    consumed: int = 0  # the target's parts and notes that need no room here any more
    window: int = 0  # how many more than those the target may send
    sent_ns: int = 0  # the sender's clock
    echo_ns: int = 0  # the target's clock when it sent what the sender heard last, and the time since; 0: heard nothing
    digest: int | None = None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Up:
    """Both directions work."""


@dataclass(frozen=True, slots=True)
class Down:
    """The peer's end is closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """The next note."""

    data: bytes
    digest: int | None


Heard = Up | Down | Note


class Conversation:
    """`former_session`: the peer's in the link before this one."""

    def __init__(
        self, own: InstanceId, peer: InstanceId, session: int, *, former_session: int, window: int, now_ns: int
    ) -> None:
        self.session = session
        self.peer_session = 0
        self.is_up = False
        self.heard_ns = now_ns
        self.rtt_s: float | None = None
        self.num_polled = 0  # notes; counted by whoever hands them out
        self._own, self._peer = own, peer
        self._former_session = former_session
        self._window = window
        self._num_sent = 0  # parts and notes
        self._peer_consumed = self._peer_window = 0
        self._num_received = self._num_parts = 0
        self._told = 0  # the last `consumed`
        self._early: dict[int, Frame] = {}
        self._parts: list[bytes] = []
        self._peer_sent_ns = 0

    def receive(self, frame: Frame, now_ns: int) -> list[Heard] | None:
        """Return what a frame means; None: it belongs to another link and is dropped."""
        if frame.session <= self._former_session or frame.session < self.peer_session:
            return None
        if frame.session > self.peer_session and self.is_up:
            return [Down("the peer began a new link")]
        if frame.peer_session not in (0, self.session):
            return None
        self.peer_session, self.heard_ns = frame.session, now_ns
        if frame.peer_session == 0:
            return []
        self._learn(frame, now_ns)
        heard: list[Heard] = [] if self.is_up else [Up()]
        self.is_up = True
        if frame.kind is Kind.BYE:
            heard.append(Down("the peer closed the link"))
        elif frame.kind is not Kind.BEAT:
            heard.extend(self._accept(frame))
        return heard

    def _accept(self, frame: Frame) -> Iterator[Heard]:
        """A peer may be as far ahead as we told it, and not further."""
        if not self._num_received < frame.number <= self._num_consumed + self._window:
            yield Down(f"the peer sent part {frame.number} of its notes after {self._num_received}")
            return
        self._early[frame.number] = frame
        yield from self._in_order()

    @property
    def num_early(self) -> int:
        """Parts that wait for others before them."""
        return len(self._early)

    def beat(self, now_ns: int) -> Frame:
        """Return a heartbeat."""
        self._told = self._num_consumed
        echo_ns = self._peer_sent_ns + now_ns - self.heard_ns if self._peer_sent_ns else 0
        frame = self._frame(Kind.BEAT)
        return replace(frame, consumed=self._told, window=self._window, sent_ns=now_ns, echo_ns=echo_ns)

    def bye(self) -> Frame:
        return self._frame(Kind.BYE)

    @property
    def peer_should_know(self) -> bool:
        """Whether so much was taken that the peer should hear of it before the next heartbeat."""
        return self._num_consumed - self._told > self._window // 4

    @property
    def has_room(self) -> bool:
        """Whether the peer takes another part or note."""
        return self._num_sent - self._peer_consumed < self._peer_window

    def next_frame(self, part: bytes, *, is_last: bool, digest: int | None) -> Frame:
        """Return the frame of a note's next part. Call while there is room."""
        self._num_sent += 1
        return replace(
            self._frame(Kind.NOTE if is_last else Kind.PART), number=self._num_sent, digest=digest, data=part
        )

    @property
    def _num_consumed(self) -> int:
        return self._num_parts + self.num_polled

    def _learn(self, frame: Frame, now_ns: int) -> None:
        if frame.kind is not Kind.BEAT:
            return
        self._peer_consumed, self._peer_window = max(self._peer_consumed, frame.consumed), frame.window
        self._peer_sent_ns = frame.sent_ns
        if frame.echo_ns:
            self.rtt_s = (now_ns - frame.echo_ns) / 1e9

    def _in_order(self) -> Iterator[Note]:
        while (frame := self._early.pop(self._num_received + 1, None)) is not None:
            self._num_received += 1
            self._parts.append(frame.data)
            if frame.kind is Kind.PART:
                self._num_parts += 1
                continue
            yield Note(b"".join(self._parts), frame.digest)
            self._parts.clear()

    def _frame(self, kind: Kind) -> Frame:
        return Frame(kind, self._own, self._peer, self.session, self.peer_session)


def parts_of(note: bytes) -> list[bytes]:
    """Cut a note into what fits into frames."""
    return [note[first : first + PART_NBYTES] for first in range(0, len(note), PART_NBYTES)]


def encode_frame(frame: Frame, key: bytes) -> bytes:
    """Return the bytes of a frame for an engine with that link key."""
    names = frame.source, frame.target, frame.session, frame.peer_session
    flow = frame.number, frame.consumed, frame.window, frame.sent_ns, frame.echo_ns
    header = _HEADER.pack(VERSION, frame.kind, frame.digest is not None, *names, *flow, frame.digest or 0)
    return key + header + frame.data


def is_authentic(data: bytes, key: bytes) -> bool:
    """Whether a frame carries our key, in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(data[:LINK_KEY_NBYTES], key)


def decode_frame(data: bytes) -> Frame:
    """Return what was encoded, of an authentic frame. Raises `MalformedNote`."""
    data = data[LINK_KEY_NBYTES:]
    if len(data) < _HEADER.size or data[0] != VERSION:
        raise MalformedNote(f"{len(data)} bytes that are no frame of version {VERSION}")
    _, kind, has_digest, *names_and_flow, digest = _HEADER.unpack_from(data)
    if kind not in Kind.__members__.values():
        raise MalformedNote(f"a frame of the unknown kind {kind}")
    fields: list[Any] = [Kind(kind), *names_and_flow, digest if has_digest else None, data[_HEADER.size :]]
    return Frame(*fields)
