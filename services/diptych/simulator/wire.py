"""The wire in virtual time: effects of cores become events of theirs, and of their peers'. A model.

Pages leave a worker by one port, in order, at its speed; a note takes a moment, and comes behind all that was written
on its stream. Pages that follow a step go in pieces, each when the step has come so far. What arrives is what was sent,
so digests agree. A link that goes down takes with it what is under way there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from diptych.engine.values.events import (
    DigestPages,
    Effect,
    NoteArrived,
    PagesDigested,
    PeerDown,
    PeerUp,
    SendNote,
    StreamPages,
    WriteDone,
    WritePages,
    WriterGone,
)
from diptych.kvtransfer.notes import Note
from diptych.simulator.clock import Clock
from diptych.simulator.setup import Delays
from diptych.simulator.worker import SimWorker

DIGEST: Final = 0  # of all pages
SUSPECT_CHECK_S: Final = 0.2  # until a lost peer provably can't write any more

_Link = frozenset[int]


@dataclass(slots=True, eq=False)
class _Write:
    """A write under way."""

    worker: SimWorker
    effect: WritePages | StreamPages
    is_over: bool = False


@dataclass(slots=True)
class _Stream:
    """What a worker has written for a room."""

    ends_s: float
    digest: int | None


class Wire:
    """All links between workers. `workers` are those that live, by number."""

    def __init__(self, clock: Clock, delays: Delays, num_windows: int, workers: Mapping[int, SimWorker]) -> None:
        self._clock = clock
        self._delays = delays
        self._num_windows = num_windows
        self._workers = workers
        self._writes: dict[_Link, list[_Write]] = {}  # links that are up, with what is under way
        self._free_s: dict[int, float] = {}  # when a worker's port is free
        self._streams: dict[tuple[int, int], _Stream] = {}  # by worker and room
        self.moved_bytes = 0

    # links

    def is_up(self, one: int, other: int) -> bool:
        return frozenset((one, other)) in self._writes

    def link(self, one: SimWorker, other: SimWorker) -> None:
        self._writes[frozenset((one.worker_id, other.worker_id))] = []
        one.hear(PeerUp(other.worker_id))
        other.hear(PeerUp(one.worker_id))

    def unlink(self, one: int, other: int, reason: str) -> None:
        """Both lose the link, as far as they live."""
        for write in self._writes.pop(frozenset((one, other))):
            if not write.is_over:
                self._end(write, reason)
        for lost, left in ((one, other), (other, one)):
            worker = self._workers.get(left)
            if worker is not None:
                worker.hear(PeerDown(lost, reason))
                self._clock.after(SUSPECT_CHECK_S, partial(worker.hear, WriterGone(lost)))

    # transfers

    def perform(self, worker: SimWorker, effect: Effect, step_s: float) -> None:
        match effect:
            case WritePages():
                self._write(worker, effect, [self._clock.now_s])
            case StreamPages():
                parts = range(1, self._num_windows + 1)
                self._write(worker, effect, [self._clock.now_s + step_s * part / len(parts) for part in parts])
            case SendNote(peer, note, stream, digest):
                self._send(worker, peer, note, stream, digest)
            case DigestPages(room, pages):
                reading_s = len(pages) * worker.page_nbytes / worker.setup.link_bytes_per_s
                self._clock.after(reading_s, lambda: worker.hear(PagesDigested(room, DIGEST)))
            case _:
                raise AssertionError(f"nobody asks for {effect} here")

    def _write(self, worker: SimWorker, effect: WritePages | StreamPages, ready_s: list[float]) -> None:
        """Write in so many pieces of equal size, each of which can leave at its time."""
        write = _Write(worker, effect)
        num_pages = len(effect.write.dst)
        worker.num_open_pages += num_pages
        if not self.is_up(worker.worker_id, effect.peer):
            self._end(write, "there is no link")
            return
        num_bytes = num_pages * worker.page_nbytes
        self.moved_bytes += num_bytes
        end_s = self._free_s.get(worker.worker_id, 0.0)
        for each_s in ready_s:
            end_s = max(end_s, each_s) + num_bytes / len(ready_s) / worker.setup.link_bytes_per_s
        self._free_s[worker.worker_id] = end_s
        digest = DIGEST if effect.flow.with_digest else None
        self._streams[worker.worker_id, effect.room] = _Stream(end_s, digest)
        self._writes[frozenset((worker.worker_id, effect.peer))].append(write)
        self._clock.at(end_s, lambda: self._end(write, None))

    def _end(self, write: _Write, error: str | None) -> None:
        if write.is_over:
            return
        write.is_over = True
        effect, worker = write.effect, write.worker
        if error is None:
            self._writes[frozenset((worker.worker_id, effect.peer))].remove(write)
        worker.num_open_pages -= len(effect.write.dst)
        digest = DIGEST if effect.flow.with_digest and error is None else None
        worker.hear(WriteDone(effect.room, error, digest))

    def _send(self, worker: SimWorker, peer: int, note: Note, stream: int, digest: int | None) -> None:
        if not self.is_up(worker.worker_id, peer):
            return
        sent_s = self._clock.now_s
        written = self._streams.get((worker.worker_id, stream)) if stream else None
        if written is not None:
            sent_s, digest = max(sent_s, written.ends_s), written.digest
            del self._streams[worker.worker_id, stream]  # a room's only note on its stream is its last
        link = frozenset((worker.worker_id, peer))
        life = self._writes[link]  # another list, once the link has been down
        self._clock.at(sent_s + self._delays.note_s, lambda: self._arrive(worker.worker_id, peer, note, digest, life))

    def _arrive(self, sender: int, target: int, note: Note, digest: int | None, life: list[_Write]) -> None:
        if self._writes.get(frozenset((sender, target))) is life and target in self._workers:
            self._workers[target].hear(NoteArrived(sender, note, digest))
