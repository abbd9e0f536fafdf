"""What the two ends of a link say to each other where nothing but messages exists: heartbeats, notes, goodbyes.

Each frame begins with the link key of its target: nothing of one without it is believed. It names its sender and its
target, by instance and by session, so that one for a former instance or a former link is recognised. Note frames are
numbered, for not every library promises an order; a long note may be several of them.
"""

from __future__ import annotations

import enum
import hmac
import struct
from dataclasses import dataclass
from typing import Final

from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.metadata import LINK_KEY_NBYTES
from diptych.kvtransfer.transport import InstanceId

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
    taken: int = 0  # the target's parts and notes that need no room here any more
    window: int = 0  # how many more than those the target may send
    sent_ns: int = 0  # the sender's clock
    echo_ns: int = 0  # the target's clock when it sent what the sender heard last, and the time since; 0: heard nothing
    digest: int | None = None
    data: bytes = b""


def encode(frame: Frame, key: bytes) -> bytes:
    """Return the bytes of a frame for an engine with that link key."""
    names = frame.source, frame.target, frame.session, frame.peer_session
    flow = frame.number, frame.taken, frame.window, frame.sent_ns, frame.echo_ns
    header = _HEADER.pack(VERSION, frame.kind, frame.digest is not None, *names, *flow, frame.digest or 0)
    return key + header + frame.data


def is_authentic(data: bytes, key: bytes) -> bool:
    """Whether a frame carries our key, in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(data[:LINK_KEY_NBYTES], key)


def decode(data: bytes) -> Frame:
    """Return what was encoded, of an authentic frame. Raises `MalformedNote`."""
    data = data[LINK_KEY_NBYTES:]
    if len(data) < _HEADER.size or data[0] != VERSION:
        raise MalformedNote(f"{len(data)} bytes that are no frame of version {VERSION}")
    _, kind, has_digest, *names, number, taken, window, sent_ns, echo_ns, digest = _HEADER.unpack_from(data)
    if kind not in Kind.__members__.values():
        raise MalformedNote(f"a frame of the unknown kind {kind}")
    source, target, session, peer_session = names
    return Frame(
        Kind(kind),
        source,
        target,
        session,
        peer_session,
        number,
        taken,
        window,
        sent_ns,
        echo_ns,
        digest if has_digest else None,
        data[_HEADER.size :],
    )
