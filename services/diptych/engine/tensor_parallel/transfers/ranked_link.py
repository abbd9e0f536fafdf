"""What a link of several ranks consists of, and the metadata that opens it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.errors import MalformedMetadata
from diptych.kvtransfer.transport import InstanceId, NoteReceived
from diptych.v1 import rank_pb2

VERSION: Final = 2


@dataclass(slots=True, eq=False)
class Operation:
    """What rank 0's caller knows as one operation."""

    name: int
    link: RankedLink | None  # None: it only computes a digest
    num_parts: int  # ranks that are still at it
    note: bytes  # to be sent when all are done
    note_digest: int | None = None  # in place of the stream's
    digest: int | None = None  # of the parts so far
    error: str | None = None
    stream: int = 0
    is_queued: bool = False  # in its stream's queue


@dataclass(slots=True, eq=False)
class Stream:
    """Operations in the order in which they must end, or their notes leave."""

    queue: deque[Operation] = field(default_factory=deque)
    digest: int | None = None  # of what was written since the last note
    error: str | None = None  # of an operation: all later ones fail too

    @property
    def is_over(self) -> bool:
        return not self.queue and self.digest is None and self.error is None


@dataclass(slots=True, eq=False)
class RankedLink:
    """A link from `connect` until it is down on every rank."""

    peer: InstanceId
    up: set[int] = field(default_factory=set)  # ranks
    down: set[int] = field(default_factory=set)  # ranks
    reason: str | None = None  # why it is closing
    moving: set[int] = field(default_factory=set)  # operations whose pages are on their way
    early: list[NoteReceived] = field(default_factory=list)  # before the last rank was up
    streams: dict[int, Stream] = field(default_factory=dict)


def ranked_metadata(ranks: Iterable[bytes]) -> bytes:
    """Return the metadata of an instance from that of each of its ranks, in order."""
    return rank_pb2.RankedEngineMetadata(version=VERSION, ranks=ranks).SerializeToString()


def ranks_of(metadata: bytes) -> Sequence[bytes]:
    """Return the metadata of each rank of a peer, in order. Raises `MalformedMetadata`."""
    try:
        wire = rank_pb2.RankedEngineMetadata.FromString(metadata)
    except DecodeError as error:
        raise MalformedMetadata(f"not the transfer metadata of an instance: {error}") from error
    if wire.version != VERSION or not wire.ranks:
        words = f"transfer metadata of version {wire.version} with {len(wire.ranks)} ranks"
        raise MalformedMetadata(f"{words}; ours is of version {VERSION}")
    return wire.ranks


def sum_digests(one: int | None, other: int | None) -> int | None:
    """Return the digest of what both are digests of; None where none was computed."""
    return other if one is None else one if other is None else add_digests(one, other)
