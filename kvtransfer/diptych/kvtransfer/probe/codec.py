"""Notes of a link test to and from `diptych.v1.TransferNote` bytes."""

from __future__ import annotations

import math
from typing import Final

from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.notes import PROTOCOL_VERSION
from diptych.kvtransfer.pool import MAX_PROBE_PAGES
from diptych.kvtransfer.probe.notes import Directions, ProbeAsk, ProbeCheck, ProbeEnd, ProbeFound, ProbeNote, ProbeOffer
from diptych.v1 import transfer_pb2

MAX_PAGE_SIZE: Final = 4096  # tokens


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
