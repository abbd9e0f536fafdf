"""What every transport offers, in three protocols: page memory, links to peers, and operations on pages and notes.

`UcxTransport`, `NixlTransport` and, for tests, `InprocTransport` implement all three. Memory is this process's own.
What names a peer can be decorated: `TensorParallelTransport` shows the ranks of an instance as one, and `FanOut` a
rank's links to the ranks of a peer. Users ask for the protocol that they need.

Ordering contract, per link and stream. Operations are done in the order they were submitted: a note arrives after every
page of its own write and of all earlier ones, while pages of writes without a note between them arrive in any order.
When one failed, all later ones of its stream fail too, for a note must not arrive without the pages before it; what
there is to say about that goes by stream 0, which belongs to no room.
Streams do not wait for each other: they take turns by bytes, those of a higher priority first.

Every operation ends in exactly one `OpDone`. `LinkDown` comes after the `OpDone` of every operation of that link, and
after it nothing of ours writes to that peer. A transport belongs to one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from diptych.kvtransfer.device import Device
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.layout import PoolLayout

InstanceId = int  # random, 64-bit, never 0, new at every start of a process
ANY_PEER: Final = 2**64 - 1  # that is linked
PageIndices = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class PageWrite:
    """Pages to move: `dst[i]` receives `src[i]`. Where the page sizes differ, `dst` receives the tokens of `src`.

    What is in them may be no tokens but bytes that mean something to their reader alone, as a state does: then `dst`
    receives the bytes of `src` in order, whatever the layouts, from the rank of the same number.
    """

    src: PageIndices  # of our pool
    dst: PageIndices  # of the peer's
    layers: tuple[int, int] | None = None  # [first, end) of each page; None: all of it
    skip_tokens: int = 0  # of src[0]; only where the page sizes differ
    as_bytes: bool = False  # they hold no tokens


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
    digest: int | None = None  # of all that its stream wrote since its last note; None: not computed


@dataclass(frozen=True, slots=True)
class OpDone:
    """An operation ended: remotely complete, or failed with a reason."""

    op: int
    error: str | None
    digest: int | None = None  # of what it wrote, if that was wanted; of the pages, of `digest_pages`
    seconds: float = field(default=0.0, compare=False)  # from its submission to its end; 0: not measured


TransportEvent = LinkUp | LinkDown | NoteReceived | OpDone


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What a link runs on, for logs and status."""

    lanes: str
    version: str  # of the transport library
    bytes_sent: int
    last_heard_s: float  # seconds since the peer was last heard
    path: str  # how pages travel: one of `paths`
    rtt_s: float | None = None  # of a heartbeat; None: not measured yet
    in_flight_bytes: int = 0  # posted, not complete
    queued_bytes: int = 0  # submitted, not posted

    def __str__(self) -> str:
        return f"{self.lanes}, pages by {self.path} ({self.version})"


@dataclass(frozen=True, slots=True)
class Refusals:
    """What was sent to us and not taken, since start, and who may send: all zero in a healthy deployment."""

    num_unauthenticated: int = 0  # messages without our link key
    num_ungranted: int = 0  # messages with pages that were not granted to their sender; each ended its link
    is_open: bool = False  # strangers get connections of the transport library, which nothing keeps from them


class ProbePages(Protocol):
    """The pages that links are tested with, behind those of a pool, wherever its memory is."""

    @property
    def layout(self) -> PoolLayout: ...

    @property
    def probe_pages(self) -> PageIndices:
        """Pages behind those of the layout, never granted: peers may write to them to test a link."""
        ...

    @property
    def pattern_pages(self) -> PageIndices:
        """Pages behind those: what tests write to peers. Nobody writes to these."""
        ...

    def fill_pattern(self, seed: int) -> None:
        """Fill the pattern pages with bytes that follow from `seed`, 64 bits."""
        ...


class Pool(ProbePages, Protocol):
    """Page memory of the host that peers may write into. Lives as long as its transport."""

    @property
    def buffer(self) -> memoryview:
        """All pages of the layout, as writable bytes."""
        ...


class DevicePages(ProbePages, Protocol):
    """Page memory of a device that peers may write into. Lives as long as its transport."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All pages, and the probe and pattern pages, as bytes `[num_pages, page_nbytes]`."""
        ...


class TransportMemory(Protocol):
    """The pool of this process, and what peers may do to it. Names no peer, so nothing decorates it."""

    def allocate_pool(self, layout: PoolLayout) -> Pool:
        """Allocate zeroed, touched page memory. Once, before `metadata`."""
        ...

    def allocate_device_pool(self, layout: PoolLayout, device: Device) -> DevicePages:
        """Allocate it in the memory of `device`, in place of `allocate_pool`.

        Raises `ConfigError` where the device or the transport can't have one, and `TransferError`.
        """
        ...

    def metadata(self) -> bytes:
        """What a peer needs to `connect`; versioned."""
        ...

    def revoke_pages(self, pages: PageIndices) -> None:
        """From now on nothing that a peer sends is written into these pages."""
        ...

    def refusals(self) -> Refusals: ...


class TransportLinks(Protocol):
    """The links to peers: their life, their paths, and who may write here over them."""

    @property
    def instance_id(self) -> InstanceId:
        """The name that peers know us by."""
        ...

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        """Start to link; `LinkUp` or `LinkDown` follows. An open link stays as it is.

        Raises `MalformedMetadata`, and `LayoutMismatch` where pages can't be converted.
        """
        ...

    def disconnect(self, peer: InstanceId) -> None:
        """Close the link; `LinkDown` follows. A peer without a link is ignored."""
        ...

    def describe(self, peer: InstanceId) -> LinkInfo: ...

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        """Return the paths by which pages get to a linked peer, best first; see docs/concepts/kv-transfer.md."""
        ...

    def use_path(self, peer: InstanceId, path: str) -> None:
        """Bring pages there by another one of `paths`. Raises `TransferError` while operations of the link are open."""
        ...

    def lands_in_parts(self, peer: InstanceId) -> bool:
        """Whether pages that the peer writes land as parts that `unpack_pages` has to put together."""
        ...

    def grant_pages(self, peer: InstanceId, pages: PageIndices) -> None:
        """Let the peer, or `ANY_PEER`, write into pages of ours until they are revoked. Raises `PageOutOfRange`.

        Binds where we bring the bytes into our pool ourselves, if the transport was opened so. One-sided writes pass
        us by.
        """
        ...

    def writer_gone(self, peer: InstanceId) -> bool:
        """Whether a peer whose link is down provably can't write into our pool any more."""
        ...


class TransportOperations(Protocol):
    """What is done over links, and with pages of ours, and how it ended."""

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        """Write pages to the peer, then send `note` if there is one; return the operation.

        Source pages must not change until it has ended. Raises `PeerUnreachable` without a link, `PageOutOfRange`, and
        `TransferQueueFull` when too much is in flight.
        """
        ...

    def send_note(self, peer: InstanceId, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        """Send a note; return the operation. Raises as `write_pages` does.

        It carries the stream's digest, or `digest` in place of it.
        """
        ...

    def digest_pages(self, pages: PageIndices) -> int:
        """Compute the digest of pages of ours, as they lie here, beside other work; its `OpDone` has it.

        It does not wait for kernels of a device by itself, as `write_pages` does: what it is for are pages of peers.
        Raises `PageOutOfRange` and `TransferQueueFull`.
        """
        ...

    def unpack_pages(self, peer: InstanceId, pages: PageIndices) -> int:
        """Put together the parts of pages that the peer wrote, in place and beside other work; return the operation.

        Not before they were verified, and once: a digest asked for before is that of the pages as they landed. Raises
        as `digest_pages` does, and `PeerUnreachable` for a peer that was never linked.
        """
        ...

    def poll(self) -> list[TransportEvent]:
        """Return what happened since the last call, without waiting."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has events."""
        ...


class PeerTransport(TransportLinks, TransportOperations, Protocol):
    """All that names peers: a transport, or a decorator that shows several links as one."""

    def close(self) -> None:
        """Close every link; the pool's memory is gone after this."""
        ...


class Transport(TransportMemory, PeerTransport, Protocol):
    """All of a transport library. One a process."""
