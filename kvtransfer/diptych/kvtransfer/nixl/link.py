"""One link on the engine's thread: what it posts, completes and says."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.conversation import Conversation, Frame, encode_frame
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.metadata import EngineMetadata
from diptych.kvtransfer.nixl.agent import Agent
from diptych.kvtransfer.nixl.memory import Memory, Registered, Staging
from diptych.kvtransfer.nixl.streams import Operation, Pages, Piece, Streams
from diptych.kvtransfer.pool import num_pages_to_allocate
from diptych.kvtransfer.transport import InstanceId, OpDone

MAX_IN_FLIGHT_NBYTES: Final = 8 << 20  # NIXL can't cancel what was posted


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A piece on its way."""

    handle: Any
    piece: Piece
    places: Pages  # of its bytes in the memory that they are sent from


@dataclass(slots=True, eq=False)
class Link:
    """From `connect` to its `LinkDown`. `submitted` is filled by the user's thread, under the engine's lock."""

    peer: InstanceId
    metadata: EngineMetadata
    conversation: Conversation
    agent: Agent
    memory: Memory
    name: str  # of the peer's agent
    began_ns: int
    finish: Callable[[OpDone], None]
    staging: Callable[[PagePack], Staging]  # for images: links share it
    streams: Streams = field(default_factory=Streams)
    submitted: deque[Operation] = field(default_factory=deque)
    is_accepting: bool = False
    stagings: dict[PagePack, Staging] = field(default_factory=dict)  # that the link uses
    in_flight: deque[InFlight] = field(default_factory=deque)
    in_flight_bytes: int = 0
    bytes_sent: int = 0
    next_beat_ns: int = 0
    closing: str | None = None  # why; posts nothing more
    closing_since_ns: int = 0
    is_removed: bool = False  # the connection is closed
    _remote: dict[tuple[int, int], Any] = field(default_factory=dict)  # handles, by offset and size of a window

    @property
    def queued_bytes(self) -> int:
        """Any thread."""
        return self.streams.queued_bytes + sum(operation.queued_bytes for operation in list(self.submitted))

    def stage(self, pack: PagePack) -> Staging:
        """Return the memory of such images, which is registered at their first use. Raises `TransferError`."""
        if pack not in self.stagings:
            self.stagings[pack] = self.staging(pack)
        return self.stagings[pack]

    def send(self, frame: Frame) -> None:
        self.agent.send(self.name, encode_frame(frame, self.metadata.link_key))

    def advance(self, now_s: float) -> bool:
        """Take, complete, post and say what can be now; return whether there was anything. Raises `TransferError`."""
        before = len(self.submitted), len(self.in_flight), self.bytes_sent
        while self.submitted:
            operation = self.submitted[0]  # until it is in a stream: whatever fails, somebody tells its end
            for copy in operation.copies:
                if copy.pack is not None:
                    copy.max_pages = self.stage(copy.pack).max_pages
            self.streams.add(self.submitted.popleft())
        if not self.streams:
            return False
        self.streams.expire(now_s)
        self._complete()
        self._end_written()
        self._post()
        return before != (len(self.submitted), len(self.in_flight), self.bytes_sent)

    def note_polled(self) -> None:
        """Any one thread."""
        self.conversation.num_polled += 1

    def remove(self) -> None:
        """Close the connection."""
        self.is_removed = True
        with contextlib.suppress(TransferError):  # NIXL may have closed it before us
            self.agent.remove(self.name)

    def drop(self) -> bool:
        """Release what was posted and has ended; return whether that is everything."""
        ended = [each for each in self.in_flight if self._has_ended(each.handle)]
        for each in ended:
            self.in_flight.remove(each)
            self._free(each.piece, each.places)
        return not self.in_flight

    def release(self) -> None:
        for handle in self._remote.values():
            self.agent.release(handle)
        self._remote.clear()

    def _complete(self) -> None:
        for each in [each for each in self.in_flight if self.agent.is_complete(each.handle)]:
            self.in_flight.remove(each)
            self.agent.release(each.handle)
            self.in_flight_bytes -= each.piece.nbytes
            self.bytes_sent += each.piece.nbytes
            each.piece.operation.num_in_flight -= 1
            self._free(each.piece, each.places)

    def _end_written(self) -> None:
        for operation in self.streams.written():
            if operation.error is None and not self._send_note(operation):
                continue
            self.streams.end(operation)
            digest = operation.digest if operation.error is None else None
            self.finish(OpDone(operation.name, operation.error, digest, time.monotonic() - operation.began_s))

    def _send_note(self, operation: Operation) -> bool:
        """Send the note as far as the peer has room; return whether that was all of it."""
        parts = operation.note_parts
        while parts and self.conversation.has_room:
            digest = self.streams.digest_of(operation) if len(parts) == 1 else None
            self.send(self.conversation.next_frame(parts.popleft(), is_last=not parts, digest=digest))
        return not parts

    def _post(self) -> None:
        while self._has_room and (piece := self.streams.next_piece()) is not None:
            memory, places = self._loaded(piece)
            if piece.operation.digest is not None:
                piece.operation.digest = add_digests(piece.operation.digest, self._digest(piece, memory, places))
            try:
                handle = self._write(piece, memory, places)
            except TransferError:
                self._free(piece, places)
                raise
            self.in_flight.append(InFlight(handle, piece, places))
            self.in_flight_bytes += piece.nbytes

    def _write(self, piece: Piece, memory: Registered, places: Pages) -> Any:
        window = piece.copy.window
        theirs = self._prepared(window.dst, window.nbytes)
        return self.agent.write(memory.prepared(window.src, window.nbytes), places, theirs, piece.dst)

    @property
    def _has_room(self) -> bool:
        has_room = all(staging.has_room for staging in self.stagings.values())
        return has_room and self.in_flight_bytes < MAX_IN_FLIGHT_NBYTES

    def _loaded(self, piece: Piece) -> tuple[Registered, Pages]:
        """Where the bytes of a piece are sent from."""
        copy = piece.copy
        if copy.pack is None:
            return self.memory.registered, piece.src
        assert copy.source is not None, "an image is made of pages"
        staging = self.stagings[copy.pack]
        return staging.registered, staging.fill(copy.source, piece.src)

    def _prepared(self, offset: int, nbytes: int) -> Any:
        """The peer's pages, or a window of each."""
        if (offset, nbytes) not in self._remote:
            layout = self.metadata.layout
            base, count = self.metadata.pool_base + offset, num_pages_to_allocate(layout)
            self._remote[offset, nbytes] = self.agent.prepare(self.name, base, nbytes, layout.page_nbytes, count)
        return self._remote[offset, nbytes]

    def _digest(self, piece: Piece, memory: Registered, places: Pages) -> int:
        window, page_nbytes = piece.copy.window, self.metadata.layout.page_nbytes
        return add_digests(
            *(
                digest_bytes(memory.window(place, window.src, window.nbytes), dst * page_nbytes + window.dst)
                for place, dst in zip(places.tolist(), piece.dst.tolist(), strict=True)
            )
        )

    def _free(self, piece: Piece, places: Pages) -> None:
        if piece.copy.pack is not None:
            self.stagings[piece.copy.pack].free(places)

    def _has_ended(self, handle: Any) -> bool:
        try:
            if not self.agent.is_complete(handle):
                return False
        except TransferError:
            pass  # failed is ended, too
        self.agent.release(handle)
        return True
