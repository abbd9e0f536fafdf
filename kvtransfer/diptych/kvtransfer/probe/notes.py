"""The notes of a link test, as values and as `TransferNote` bytes. `writer` and `reader` say who sends what when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.notes import PROTOCOL_VERSION
from diptych.kvtransfer.pool import MAX_PROBE_PAGES
from diptych.v1 import transfer_pb2

MAX_PAGE_SIZE: Final = 4096  # tokens


@dataclass(frozen=True, slots=True)
class Directions:
    """Both ends, first of all: in which directions pages may go at this end."""

    out: bool  # from us to peers
    into: bool  # from peers to us

    def towards(self, peer: Directions) -> Directions:
        """Return in which directions they may go between us and a peer."""
        return Directions(self.out and peer.into, self.into and peer.out)

    def is_within(self, other: Directions) -> bool:
        return other.out >= self.out and other.into >= self.into


@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """Writer to reader: may I test the link?"""


@dataclass(frozen=True, slots=True)
class ProbeOffer:
    """Reader to writer: yes, into these pages of mine."""

    pages: tuple[int, ...]
    page_size: int  # tokens of each


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """Writer to reader, behind page writes: what do the pages hold?"""


@dataclass(frozen=True, slots=True)
class ProbeFound:
    """Reader to writer: this."""

    digest: int


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """Writer to reader: the pages are yours again, and this is the verdict."""

    path: str  # that the writer uses from now on; empty: none works
    bytes_per_s: float = 0.0  # on it; 0: not measured
    reason: str = ""  # why none works


ProbeNote = Directions | ProbeAsk | ProbeOffer | ProbeCheck | ProbeFound | ProbeEnd


def encode(note: ProbeNote, *, sender: int, target: int) -> bytes:
    """Return the bytes of `note`, addressed from one instance to another."""
    wire = transfer_pb2.TransferNote(version=PROTOCOL_VERSION, sender=sender, target=target)
    match note:
        case Directions(out, into):
            wire.probe_greeting.CopyFrom(transfer_pb2.ProbeGreeting(out=out, into=into))
        case ProbeAsk():
            wire.probe_ask.SetInParent()
        case ProbeOffer(pages, page_size):
            wire.probe_offer.CopyFrom(transfer_pb2.ProbeOffer(pages=pages, page_size=page_size))
        case ProbeCheck():
            wire.probe_check.SetInParent()
        case ProbeFound(digest):
            wire.probe_found.CopyFrom(transfer_pb2.ProbeFound(digest=digest))
        case ProbeEnd(path, bytes_per_s, reason):
            wire.probe_end.CopyFrom(transfer_pb2.ProbeEnd(path=path, bytes_per_s=bytes_per_s, reason=reason))
    return wire.SerializeToString()


def decode(data: bytes, *, sender: int, target: int) -> ProbeNote:
    """Return the note in `data`. Raise `MalformedNote` for anything else."""
    wire = note_codec.parse(data, sender=sender, target=target)
    match wire.WhichOneof("body"):
        case "probe_greeting":
            return Directions(wire.probe_greeting.out, wire.probe_greeting.into)
        case "probe_ask":
            return ProbeAsk()
        case "probe_offer":
            return _offer(wire.probe_offer)
        case "probe_check":
            return ProbeCheck()
        case "probe_found":
            return ProbeFound(wire.probe_found.digest)
        case "probe_end":
            speed = wire.probe_end.bytes_per_s
            return ProbeEnd(wire.probe_end.path, speed if 0 <= speed < math.inf else 0.0, wire.probe_end.reason)
    raise MalformedNote(f"room {wire.room:x}: not about the link, which is not tested yet")


def _offer(wire: transfer_pb2.ProbeOffer) -> ProbeOffer:
    """Each of its pages is written a thousand times: few, and small ones."""
    num_pages = len(wire.pages)
    if num_pages > MAX_PROBE_PAGES or len(set(wire.pages)) != num_pages or wire.page_size > MAX_PAGE_SIZE:
        raise MalformedNote(f"an offer of {num_pages} pages of {wire.page_size} tokens for a link test")
    return ProbeOffer(tuple(wire.pages), wire.page_size)
