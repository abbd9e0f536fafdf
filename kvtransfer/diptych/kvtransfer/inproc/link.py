"""One side's half of an in-process link: what it still has to do, stream by stream."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diptych.kvtransfer.conversation import Conversation, Frame, Note
from diptych.kvtransfer.plan import Copies
from diptych.kvtransfer.runs import Runs
from diptych.kvtransfer.transport import InstanceId


@dataclass(frozen=True, slots=True, eq=False)
class PageCopy:
    """What moves of one page."""

    runs: Runs
    src: int  # ours; packed: the image's first token
    dst: int  # the peer's


@dataclass(slots=True, eq=False)
class Operation:
    """Pages to copy, then a note to deliver if there is one."""

    name: int
    runs: tuple[Runs, ...]  # none: a note alone
    note: bytes
    note_digest: int | None  # in place of the stream's
    deadline_s: float
    digest: int | None  # of what was copied; None: not wanted
    pages: deque[PageCopy] = field(init=False)  # still to be copied

    def __post_init__(self) -> None:
        self.pages = deque(page for runs in self.runs for page in _page_copies(runs))


@dataclass(slots=True, eq=False)
class Stream:
    """Operations that are done in order."""

    name: int
    priority: int = 0
    operations: deque[Operation] = field(default_factory=deque)  # not complete, oldest first
    digest: int | None = None  # of what was written since the last note
    is_broken: bool = False  # an operation failed: all later ones do


@dataclass(slots=True, eq=False)
class Half:
    """One end of a link. A half that was closed is never opened again."""

    owner: InstanceId
    peer: InstanceId
    num_peer_pages: int
    key: bytes  # the peer's
    conversation: Conversation
    copies: Copies | None  # what the owner writes to the peer
    is_open: bool = True
    partner: Half | None = None  # the peer's half of this link, once it is up
    outbox: deque[Frame] = field(default_factory=deque)  # greetings and goodbyes
    streams: dict[int, Stream] = field(default_factory=dict)
    late: deque[Note] = field(default_factory=deque)  # held back
    bytes_sent: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.outbox or self.late) or any(stream.operations for stream in self.streams.values())

    @property
    def queued_bytes(self) -> int:
        operations = [operation for stream in self.streams.values() for operation in stream.operations]
        return sum(page.runs.window.nbytes for operation in operations for page in operation.pages)

    def append(self, stream_name: int, priority: int, operation: Operation) -> None:
        stream = self.streams.setdefault(stream_name, Stream(stream_name))
        stream.priority = priority
        stream.operations.append(operation)

    def next_stream(self, rng: random.Random | None) -> Stream | None:
        """Return a stream of the highest priority whose turn it is: in turn, or with `rng` any. None: all are done."""
        waiting = [stream for stream in self.streams.values() if stream.operations]
        if not waiting:
            return None
        highest = max(stream.priority for stream in waiting)
        turns = [stream for stream in waiting if stream.priority == highest]
        stream = rng.choice(turns) if rng else turns[0]
        self.streams[stream.name] = self.streams.pop(stream.name)  # the last in turn
        return stream

    def forget_if_over(self, stream: Stream) -> None:
        """A stream without operations is nothing, unless its digest waits for a note or it is broken."""
        if not stream.operations and stream.digest is None and not stream.is_broken:
            del self.streams[stream.name]

    def close(self) -> list[int]:
        """Do nothing more; return the operations that this ends."""
        self.is_open = False
        names = sorted(operation.name for stream in self.streams.values() for operation in stream.operations)
        self.outbox.clear()
        self.streams.clear()
        self.late.clear()
        return names


def _page_copies(runs: Runs) -> Iterator[PageCopy]:
    sources = runs.src if runs.pack is None else runs.first_tokens
    return (PageCopy(runs, src, dst) for src, dst in zip(sources.tolist(), runs.dst.tolist(), strict=True))
