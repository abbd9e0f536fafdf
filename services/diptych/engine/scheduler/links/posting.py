"""Hands what a scheduler's core wants moved to the transfer engine: in order, as far as that has room, never waiting.

Pages that follow the forward pass go by windows of layers, each when the step has computed it. The core hears of one
end of the whole: that of its last piece, with the first error. `PageGrants` follows what peers may write here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from diptych.engine.values.batch import OnLayer
from diptych.engine.values.events import (
    DigestPages,
    Event,
    HandOffSent,
    PagesDigested,
    PagesUnpacked,
    SendNote,
    StreamPages,
    Transfer,
    UnpackPages,
    WriteDone,
    WritePages,
)
from diptych.engine.values.transfer_rules import Window
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.errors import TransferError, TransferQueueFull
from diptych.kvtransfer.notes import Abort, AbortAck, HandOff, Note, PagesReady, Pull, Pulled
from diptych.kvtransfer.transport import (
    InstanceId,
    OpDone,
    PageIndices,
    PageWrite,
    PeerTransport,
    TransportLinks,
    TransportMemory,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Write:
    """What the core knows as one write."""

    effect: WritePages | StreamPages
    num_left: int  # pieces that have not ended
    error: str | None = None
    digest: int | None = None

    @property
    def peer(self) -> int:
        return self.effect.peer


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What the transfer engine knows as one write."""

    write: _Write
    pages: PageWrite

    @property
    def peer(self) -> int | None:
        return self.write.peer


_Job = _Piece | SendNote | DigestPages | UnpackPages
_ON_OWN_PAGES = DigestPages | UnpackPages


class PageGrants:
    """Tells the transfer engine which pages a peer may write: from our `PagesReady` to its last word on the room.

    A peer's `HandOff`, `Abort` and `AbortAck` all say that no write will come any more; the end of its link does, too.
    Of a pull that is from our `Pull` to its `Pulled`.
    """

    def __init__(self, links: TransportLinks, memory: TransportMemory) -> None:
        self._links = links
        self._memory = memory
        self._granted: dict[InstanceId, dict[int, PageIndices]] = {}  # by room

    def note_leaves(self, peer: InstanceId, note: Note) -> None:
        """Call before it does: the peer may answer at once."""
        if isinstance(note, PagesReady | Pull):
            pages = np.array(note.pages, dtype=np.int64)
            self._links.grant_pages(peer, pages)
            self._granted.setdefault(peer, {})[note.room] = pages

    def note_arrived(self, peer: InstanceId, note: Note) -> None:
        if isinstance(note, HandOff | Abort | AbortAck | Pulled):
            self.end(peer, note.room)

    def end(self, peer: InstanceId, room: int) -> None:
        """The peer writes no more pages of the room, or never heard of them."""
        pages = self._granted.get(peer, {}).pop(room, None)
        if pages is not None:
            self._memory.revoke_pages(pages)

    def link_down(self, peer: InstanceId) -> None:
        for pages in self._granted.pop(peer, {}).values():
            self._memory.revoke_pages(pages)


class Posting:
    """Queues what the transfer engine refuses for want of room. `events` is where the ends of operations go."""

    def __init__(
        self, transport: PeerTransport, grants: PageGrants, windows: Sequence[Window], events: list[Event]
    ) -> None:
        self._transport = transport
        self._grants = grants
        self._windows = {end: (start, end) for start, end in windows}  # of layers, that cover all
        self._events = events
        self.queue: deque[_Job] = deque()  # that waits for `post`
        self._writes: dict[int, _Write] = {}  # by operation
        self._digests: dict[int, int] = {}  # operation -> room
        self._unpackings: dict[int, int] = {}  # operation -> room
        self._hand_offs: dict[int, int] = {}  # operation -> room
        self._streams: list[_Write] = []  # of the step that runs
        self._num_windows_done = 0  # of its layers
        self.num_pages_sent = 0
        self.num_pages_open = 0  # of writes that have not ended

    def perform(self, effect: Transfer) -> None:
        match effect:
            case WritePages():
                self.queue.append(_Piece(_Write(effect, 1), effect.write))
            case StreamPages():
                self._streams.append(_Write(effect, len(self._windows)))
            case SendNote() | DigestPages() | UnpackPages():
                self.queue.append(effect)
        if isinstance(effect, WritePages | StreamPages):
            self.num_pages_sent += len(effect.write.dst)
            self.num_pages_open += len(effect.write.dst)
        self.post()

    def layer_listener(self) -> OnLayer | None:
        """Return who is to hear of each layer of the next step; None when nobody cares."""
        return self._on_layer if self._streams else None

    def give_up_step(self) -> None:
        """The step that runs will not be complete: what follows it ends with what it has brought so far."""
        streams, self._streams = self._streams, []
        num_missing, self._num_windows_done = len(self._windows) - self._num_windows_done, 0
        for write in streams:
            for _ in range(num_missing):
                self._end_piece(write, "the step was given up", None)

    def on_done(self, done: OpDone) -> None:
        """An operation ended. It may be that of a note, which nobody waits for but to know how long it took."""
        if (write := self._writes.pop(done.op, None)) is not None:
            self._end_piece(write, done.error, done.digest)
        elif (room := self._digests.pop(done.op, None)) is not None:
            self._events.append(PagesDigested(room, done.digest))
        elif (room := self._unpackings.pop(done.op, None)) is not None:
            self._events.append(PagesUnpacked(room, done.error))
        elif (room := self._hand_offs.pop(done.op, None)) is not None and done.seconds:
            self._events.append(HandOffSent(room, done.seconds))

    def post(self) -> None:
        """Hand over what waits, as far as there is room: completions make some."""
        while self.queue and self._hand_over():
            pass

    def refuse_all(self, peer: int, reason: str) -> None:
        """Give up what still waits to be handed over for a peer."""
        jobs, self.queue = self.queue, deque()
        for job in jobs:
            if isinstance(job, _ON_OWN_PAGES) or job.peer != peer:
                self.queue.append(job)
            else:
                self._refuse(job, reason)

    def _on_layer(self, layer: int) -> None:
        """The KV of a layer is in the pool, and so is that of all layers before it."""
        window = self._windows.get(layer + 1)
        if window is None:
            return
        self._num_windows_done += 1
        for write in self._streams:
            self.queue.append(_Piece(write, replace(write.effect.write, layers=window)))
        if self._num_windows_done == len(self._windows):
            self._streams, self._num_windows_done = [], 0
        while self.queue and not _grants(self.queue[0]) and self._hand_over():
            pass

    def _hand_over(self) -> bool:
        """Post the next job, if there is room."""
        try:
            self._post(self.queue[0])
        except TransferQueueFull:
            return False
        except TransferError as error:
            self._refuse(self.queue[0], str(error))
        self.queue.popleft()
        return True

    def _post(self, job: _Job) -> None:
        match job:
            case _Piece(write, pages):
                self._writes[self._transport.write_pages(write.peer, pages, flow=write.effect.flow)] = write
            case SendNote(peer, note, stream, digest):
                data = note_codec.encode(note, sender=self._transport.instance_id, target=peer)
                self._grants.note_leaves(peer, note)
                operation = self._transport.send_note(peer, data, stream=stream, digest=digest)
                if isinstance(note, HandOff):
                    self._hand_offs[operation] = note.room
            case DigestPages(room, granted):
                self._digests[self._transport.digest_pages(granted)] = room
            case UnpackPages(room, peer, granted):
                self._unpackings[self._transport.unpack_pages(peer, granted)] = room

    def _refuse(self, job: _Job, reason: str) -> None:
        match job:
            case _Piece(write, _):
                self._end_piece(write, reason, None)
            case SendNote(peer, note, _, _):
                self._grants.end(peer, note.room)
                logger.info("note to %016x not sent: %s", peer, reason)
            case DigestPages(room, _):
                self._events.append(PagesDigested(room, None))
            case UnpackPages(room, _, _):
                self._events.append(PagesUnpacked(room, reason))

    def _end_piece(self, write: _Write, error: str | None, digest: int | None) -> None:
        write.num_left -= 1
        write.error = write.error or error
        if digest is not None:
            write.digest = add_digests(write.digest or 0, digest)
        if write.num_left == 0:
            self.num_pages_open -= len(write.effect.write.dst)
            digest = None if write.error else write.digest
            self._events.append(WriteDone(write.effect.room, write.error, digest))


def _grants(job: _Job) -> bool:
    """Whether a job grants pages. It waits for other ranks, which in a step wait for this one."""
    return isinstance(job, SendNote) and isinstance(job.note, PagesReady | Pull)
