"""Which operation of a link posts its next piece. Pure.

Streams of the highest priority go first, and among them the one that has had the fewest bytes; one that comes back
after a pause has no claim on what it missed. Operations of a stream are done one after the other, for they may write
the same pages; when one fails, so do all later ones, except on stream 0.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.runs import ByteWindow

PIECE_NBYTES: Final = 2 << 20  # of one post, unless a page is larger: other streams and heartbeats wait behind it

Pages = npt.NDArray[np.integer[Any]]


@dataclass(slots=True, eq=False)
class PageCopy:
    """What of each page moves the same way: a region, or several that lie together."""

    src: Pages
    dst: Pages
    window: ByteWindow
    pack: PagePack | None = None
    source: Pages | None = None  # pages whose tokens are packed; then `src` are the first tokens of each image
    max_pages: int = sys.maxsize  # of a piece
    num_posted: int = 0  # pages

    @property
    def queued_bytes(self) -> int:
        return (len(self.src) - self.num_posted) * self.window.nbytes

    def cut(self) -> tuple[Pages, Pages]:
        """Take off the pages of the next piece: ours, and the peer's."""
        first = self.num_posted
        end = min(first + min(max(1, PIECE_NBYTES // self.window.nbytes), self.max_pages), len(self.src))
        self.num_posted = end
        return self.src[first:end], self.dst[first:end]


@dataclass(slots=True, eq=False)
class Operation:
    """Pages to write, then a note to send if there is one."""

    name: int
    stream: int
    priority: int
    deadline_s: float
    copies: deque[PageCopy]  # that are not posted yet, the first in part
    note_parts: deque[bytes]  # not sent yet
    note_digest: int | None = None  # in place of the stream's
    digest: int | None = None  # of what was posted; None: not wanted
    num_in_flight: int = 0  # pieces
    error: str | None = None
    began_s: float = 0.0
    has_note: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_note = bool(self.note_parts)

    @property
    def is_written(self) -> bool:
        return not self.copies and self.num_in_flight == 0

    @property
    def queued_bytes(self) -> int:
        """Any thread."""
        return sum(copy.queued_bytes for copy in tuple(self.copies))

    def fail(self, reason: str) -> None:
        """Post nothing more. It has ended when what was posted has."""
        self.error = self.error or reason
        self.copies.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Pages of an operation that are posted at once."""

    operation: Operation
    copy: PageCopy
    src: Pages
    dst: Pages

    @property
    def nbytes(self) -> int:
        return len(self.src) * self.copy.window.nbytes


@dataclass(slots=True, eq=False)
class _Stream:
    name: int
    served: int  # bytes
    priority: int = 0
    operations: deque[Operation] = field(default_factory=deque)  # not over, oldest first
    digest: int | None = None  # of what was written since the last note
    is_broken: bool = False


class Streams:
    """The operations of one link."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._served = 0  # how far the stream is that had the last turn
        self._next_deadline_s = math.inf

    def __bool__(self) -> bool:
        return any(stream.operations for stream in self._streams.values())

    @property
    def queued_bytes(self) -> int:
        return sum(each.queued_bytes for stream in list(self._streams.values()) for each in list(stream.operations))

    def add(self, operation: Operation) -> None:
        stream = self._streams.setdefault(operation.stream, _Stream(operation.stream, self._served))
        if not stream.operations:
            stream.served = max(stream.served, self._served)
        stream.priority = operation.priority
        self._next_deadline_s = min(self._next_deadline_s, operation.deadline_s)
        stream.operations.append(operation)
        if stream.is_broken:
            operation.fail("an earlier operation of its stream failed")

    def next_piece(self) -> Piece | None:
        """Return what to post next; it counts as posted."""
        waiting = [each for each in self._streams.values() if each.operations and each.operations[0].copies]
        if not waiting:
            return None
        stream = min(waiting, key=lambda each: (-each.priority, each.served))
        piece = _cut(stream.operations[0])
        self._served = stream.served
        stream.served += piece.nbytes
        return piece

    def expire(self, now_s: float) -> None:
        """Fail operations whose time is over."""
        if now_s <= self._next_deadline_s:
            return
        operations = self.all()
        for operation in operations:
            if now_s > operation.deadline_s:
                operation.fail("timed out")
        self._next_deadline_s = min((each.deadline_s for each in operations if each.error is None), default=math.inf)

    def written(self) -> Iterator[Operation]:
        """Yield operations that may end, each when those before it did: all of their pages are written, or they failed.

        The caller sends what an operation has to say and calls `end`, or leaves it for the next time.
        """
        for stream in list(self._streams.values()):
            while stream.operations and stream.operations[0].is_written:
                first = stream.operations[0]
                yield first
                if stream.operations and stream.operations[0] is first:
                    break

    def digest_of(self, operation: Operation) -> int | None:
        """Return what the note of a written operation carries."""
        if operation.note_digest is not None:
            return operation.note_digest
        parts = (self._streams[operation.stream].digest, operation.digest)
        known = [each for each in parts if each is not None]
        return add_digests(*known) if known else None

    def end(self, operation: Operation) -> None:
        """Forget an operation that `written` gave."""
        stream = self._streams[operation.stream]
        assert stream.operations.popleft() is operation
        if operation.error is not None:
            self._break(stream)
        elif operation.has_note:
            stream.digest = None
        elif operation.digest is not None:
            stream.digest = add_digests(stream.digest or 0, operation.digest)
        if not stream.operations and stream.digest is None and not stream.is_broken:
            del self._streams[stream.name]

    def all(self) -> list[Operation]:
        return [operation for stream in self._streams.values() for operation in stream.operations]

    def _break(self, stream: _Stream) -> None:
        stream.is_broken = stream.name != 0
        if stream.is_broken:
            for operation in stream.operations:
                operation.fail("an earlier operation of its stream failed")


def _cut(operation: Operation) -> Piece:
    copy = operation.copies[0]
    piece = Piece(operation, copy, *copy.cut())
    if not copy.queued_bytes:
        operation.copies.popleft()
    operation.num_in_flight += 1
    return piece
