"""What every transport offers: links to peers, one-sided page writes, and notes. `inproc` and `ucx` implement it.

Ordering contract. A note arrives after every page of the `write_pages` that carries it, and notes of one link arrive
in order. Every operation ends in exactly one `OpDone`. `LinkDown` comes after the `OpDone` of every operation of that
link, and after it nothing of ours writes to that peer. A transport belongs to one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diptych.kvtransfer.layout import PoolLayout

InstanceId = int  # random, 64-bit, never 0, new at every start of a process
PageIndices = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link works in both directions."""

    peer: InstanceId


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is closed."""

    peer: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class NoteReceived:
    """A peer's note, addressed to this instance."""

    peer: InstanceId
    data: bytes


@dataclass(frozen=True, slots=True)
class OpDone:
    """An operation ended: remotely complete, or failed with a reason."""

    op: int
    error: str | None


TransportEvent = LinkUp | LinkDown | NoteReceived | OpDone


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What a link runs on, for logs and status."""

    lanes: str
    version: str  # of the transport library
    bytes_sent: int
    last_heard_s: float  # seconds since the peer was last heard

    def __str__(self) -> str:
        return f"{self.lanes} ({self.version})"


class Pool(Protocol):
    """Page memory that peers may write into. Lives as long as its transport."""

    @property
    def layout(self) -> PoolLayout: ...

    @property
    def buffer(self) -> memoryview:
        """All pages, as writable bytes."""
        ...

    def digest(self, pages: PageIndices) -> int:
        """Return a 64-bit hash of the bytes of `pages`, in order."""
        ...


class Transport(Protocol):
    """One a process."""

    @property
    def instance_id(self) -> InstanceId: ...

    def allocate_pool(self, layout: PoolLayout) -> Pool:
        """Allocate zeroed, touched page memory. Once, before `metadata`."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to `connect`; versioned."""
        ...

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        """Start to link; `LinkUp` or `LinkDown` follows. Raises `MalformedMetadata`. An open link stays as it is."""
        ...

    def disconnect(self, peer: InstanceId) -> None:
        """Close the link; `LinkDown` follows. A peer without a link is ignored."""
        ...

    def write_pages(self, peer: InstanceId, src: PageIndices, dst: PageIndices, note: bytes = b"") -> int:
        """Write our pages `src` to the peer's pages `dst`, then send `note` if there is one; return the operation.

        Raises `PeerUnreachable` without a link and `TransferQueueFull` when too much is in flight.
        """
        ...

    def send_note(self, peer: InstanceId, note: bytes) -> int:
        """Send a note; return the operation. Raises as `write_pages` does."""
        ...

    def poll(self) -> list[TransportEvent]:
        """Return what happened since the last call, without waiting."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has events."""
        ...

    def describe(self, peer: InstanceId) -> LinkInfo: ...

    def writer_gone(self, peer: InstanceId) -> bool:
        """Whether a peer whose link is down provably can't write into our pool any more."""
        ...

    def close(self) -> None: ...
