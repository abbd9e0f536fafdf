"""One rank's links to the ranks of a peer as one link: to those that it writes to, or that write to it.

Up when all of them are up; when one fails all are closed, and it is down when all are down. A write goes to every rank
that needs a part of it, and ends when the last part is there. Notes are rank 0's, for rank 0 of the peer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from diptych.engine.tensor_parallel.transfers.rank_id import rank_id
from diptych.engine.tensor_parallel.transfers.ranked_link import ranks_of, sum_digests
from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.errors import PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.plan import lands_in_parts, linked_ranks, plan
from diptych.kvtransfer.transport import (
    ANY_PEER,
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    NoteReceived,
    OpDone,
    PageIndices,
    PageWrite,
    Transport,
    TransportEvent,
)

_FIRST_NAME: Final = 1 << 61  # of our own operations: the transport below has smaller ones


@dataclass(slots=True, eq=False)
class _Operation:
    """A write to several ranks, or the unpacking of what several stages have written."""

    name: int
    num_parts: int
    error: str | None = None
    digest: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of an operation that waits until the transport has room."""

    post: Callable[[], int]
    operation: _Operation


@dataclass(slots=True, eq=False)
class _Link:
    ranks: tuple[InstanceId, ...]  # of the peer
    targets: tuple[InstanceId, ...]  # those that we write to
    up: set[InstanceId] = field(default_factory=set)
    down: set[InstanceId] = field(default_factory=set)
    early: list[NoteReceived] = field(default_factory=list)  # before the last link was up

    @property
    def is_up(self) -> bool:
        return len(self.up) == len(self.ranks) and not self.down


class FanOut:
    """What `PeerTransport` says of a peer, said of this rank's links to it. Metadata to connect with is the instance's.

    What concerns no peer, and notes, are for the transport itself; so is a peer that was never connected here.
    """

    def __init__(self, transport: Transport, layout: PoolLayout) -> None:
        """`layout` is that of this rank's pool."""
        self._transport = transport
        self._layout = layout
        self._links: dict[InstanceId, _Link] = {}
        self._peers: dict[InstanceId, InstanceId] = {}  # rank -> the peer that it is part of
        self._known: dict[InstanceId, tuple[InstanceId, ...]] = {}  # ranks of each peer that was ever linked
        self._stages: dict[InstanceId, tuple[InstanceId, ...]] = {}  # of them one of each that has layers of ours
        self._in_parts: dict[InstanceId, bool] = {}  # whether pages of any rank of ours come so
        self._parts: dict[int, _Operation] = {}  # operation of the transport -> ours
        self._waiting: deque[_Part] = deque()  # of one operation
        self._names = itertools.count(_FIRST_NAME)
        self._events: list[TransportEvent] = []

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        if peer in self._links:
            return
        parts = ranks_of(metadata)
        layouts = [codec.decode_layout(part) for part in parts]
        ids = {rank: rank_id(peer, rank) for rank in linked_ranks(self._layout, layouts)}
        targets = tuple(ids[rank] for rank, layout in enumerate(layouts) if plan(self._layout, layout))
        for rank, name in ids.items():
            self._transport.connect(name, parts[rank])
            self._peers[name] = peer
        self._links[peer] = _Link(tuple(ids.values()), targets)
        self._known[peer] = tuple(ids.values())
        stages = {tuple(region.layers for region in layouts[rank].regions): ids[rank] for rank in ids}
        self._stages[peer] = tuple(stages.values())
        self._in_parts[peer] = lands_in_parts(layouts, self._layout)

    def disconnect(self, peer: InstanceId) -> None:
        for name in self._links[peer].ranks if peer in self._links else ():
            self._transport.disconnect(name)

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        targets = self._targets(peer)
        assert not note or len(targets) == 1, "a note waits for all ranks; it is sent on its own"
        return self._post([partial(self._transport.write_pages, target, write, note, flow) for target in targets])

    def lands_in_parts(self, peer: InstanceId) -> bool:
        """Whether pages of any rank of ours do: rank 0 asks for all, and those with nothing to put together end."""
        return self._in_parts.get(peer, False)

    def unpack_pages(self, peer: InstanceId, pages: PageIndices) -> int:
        if peer not in self._known:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return self._post([partial(self._transport.unpack_pages, name, pages) for name in self._stages[peer]])

    def grant_pages(self, peer: InstanceId, pages: PageIndices) -> None:
        """Where several ranks of the peer write parts of one page, to any: a page is granted to one at a time."""
        ranks = self._known.get(peer, ())
        self._transport.grant_pages(ranks[0] if len(ranks) == 1 else ANY_PEER, pages)

    def poll(self) -> list[TransportEvent]:
        for event in self._transport.poll():
            self._on_event(event)
        self._post_waiting()
        events, self._events = self._events, []
        return events

    def describe(self, peer: InstanceId) -> LinkInfo:
        first, *others = [self._transport.describe(name) for name in self._link(peer).ranks]
        return replace(
            first,
            bytes_sent=first.bytes_sent + sum(info.bytes_sent for info in others),
            in_flight_bytes=first.in_flight_bytes + sum(info.in_flight_bytes for info in others),
            queued_bytes=first.queued_bytes + sum(info.queued_bytes for info in others),
        )

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        """Return those that lead to every rank."""
        first, *others = [self._transport.paths(name) for name in self._link(peer).ranks]
        return tuple(path for path in first if all(path in usable for usable in others))

    def use_path(self, peer: InstanceId, path: str) -> None:
        for name in self._link(peer).ranks:
            self._transport.use_path(name, path)

    def writer_gone(self, peer: InstanceId) -> bool:
        return all(map(self._transport.writer_gone, self._known.get(peer, ())))

    def _on_event(self, event: TransportEvent) -> None:
        match event:
            case LinkUp(name) if name in self._peers:
                self._on_up(self._peers[name], name)
            case LinkDown(name, reason) if name in self._peers:
                self._on_down(self._peers[name], name, reason)
            case NoteReceived(peer) if peer in self._links and not self._links[peer].is_up:
                self._links[peer].early.append(event)
            case OpDone(name, error, digest) if name in self._parts:
                self._on_part(self._parts.pop(name), error, digest)
            case _:
                self._events.append(event)

    def _on_up(self, peer: InstanceId, name: InstanceId) -> None:
        link = self._links[peer]
        link.up.add(name)
        if link.is_up:
            self._events += [LinkUp(peer), *link.early]

    def _on_down(self, peer: InstanceId, name: InstanceId, reason: str) -> None:
        link = self._links[peer]
        if not link.down:
            self.disconnect(peer)
        link.down.add(name)
        if len(link.down) == len(link.ranks):
            self._post_waiting()  # what still waits for this peer is refused
            self._events.append(LinkDown(peer, reason))
            del self._links[peer]

    def _on_part(self, operation: _Operation, error: str | None, digest: int | None) -> None:
        operation.num_parts -= 1
        operation.error = operation.error or error
        operation.digest = sum_digests(operation.digest, digest)
        if operation.num_parts == 0:
            whole = None if operation.error else operation.digest
            self._events.append(OpDone(operation.name, operation.error, whole))

    def _post(self, parts: Sequence[Callable[[], int]]) -> int:
        """Begin the parts of an operation, as far as there is room; return its name. The first may be refused."""
        first, *others = parts
        if not others:
            return first()
        if self._waiting:
            raise TransferQueueFull("a part of an earlier operation waits")
        operation = _Operation(next(self._names), len(parts))
        self._parts[first()] = operation
        self._waiting.extend(_Part(post, operation) for post in others)
        self._post_waiting()
        return operation.name

    def _post_waiting(self) -> None:
        while self._waiting:
            part = self._waiting[0]
            try:
                self._parts[part.post()] = part.operation
            except TransferQueueFull:
                return  # completions make room, and bring us here again
            except TransferError as error:
                self._on_part(part.operation, str(error), None)
            self._waiting.popleft()

    def _targets(self, peer: InstanceId) -> tuple[InstanceId, ...]:
        targets = self._link(peer).targets
        if not targets:
            raise TransferError(f"nothing that this rank has belongs into the pages of {peer:016x}")
        return targets

    def _link(self, peer: InstanceId) -> _Link:
        link = self._links.get(peer)
        if link is None or not link.is_up:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return link
