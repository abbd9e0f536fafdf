"""The log that the other ranks of a scheduler apply: rank 0's end of it and of what they say, and its entries.

No call waits for a rank that died: whoever started the ranks ends all of them then.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import zmq

from diptych.common.arrays import I32, I64
from diptych.engine.cache.page_ids import PROOF_NBYTES, PageId
from diptych.engine.tensor_parallel.channels import Listening, require_connected
from diptych.engine.tensor_parallel.ended_steps import EndedSteps
from diptych.engine.values.batch import (
    DraftBatch,
    ForwardBatch,
    ForwardMode,
    ImageRows,
    Missed,
    PromptRows,
    StateMoves,
    WindowGroups,
)
from diptych.engine.values.rounds import Part, Round
from diptych.engine.values.step_rows import StepRows
from diptych.generation.segments import Image
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.transport import PageIndices, PageWrite
from diptych.v1 import rank_pb2

_ID: Final = struct.Struct(f"<HQQ{PROOF_NBYTES}s")
END_S: Final = 3.0  # that a rank gets to end its step, before whoever started it ends it
EVENTS: Final = "events"  # channels of all ranks
RESTORES: Final = "restores"
TASKS: Final = "tasks"
_ARRAYS: Final = ("input_ids", "positions", "out_slots", "seq_lens", "extend_lens", "num_sampled")  # of both forms


class RankLog:
    """Entries go to every rank in one order. Any thread may append, begin steps and end them; the rest is for one.

    `task_ends` belongs to the one thread that has tasks done. No socket is used by two threads at once: what is sent is
    sent under a lock, and answers come over sockets of their own.
    """

    def __init__(self, channels: Listening, size: int) -> None:
        """Listen for the ranks 1 to `size - 1`."""
        self.size = size
        self._channels = [channels.listen(zmq.PAIR, log_of(rank)) for rank in range(1, size)]
        self._answers = [channels.listen(zmq.PULL, answers_of(rank)) for rank in range(1, size)]
        self._events, self._restores = channels.listen(zmq.PULL, EVENTS), channels.listen(zmq.PULL, RESTORES)
        self._task_ends = channels.listen(zmq.PULL, TASKS)
        self._lock = threading.Lock()
        self._restored: list[int] = []  # that nobody has heard of yet
        self._loaded: list[rank_pb2.LoadEnd] = []  # from files
        self._loaded_from_store: list[rank_pb2.LoadEnd] = []
        self._steps = EndedSteps()

    def wait_for_ranks(self, within_s: float) -> None:
        """Wait until all are connected. Raises `Unavailable`, which names one that is not."""
        deadline_s = time.monotonic() + within_s
        for rank, channel in enumerate(self._channels, 1):
            require_connected(rank, channel, deadline_s)

    def append(self, entry: rank_pb2.RankEntry) -> None:
        data = entry.SerializeToString()
        with self._lock:
            self._send(data)

    def ask(self, entry: rank_pb2.RankEntry) -> list[rank_pb2.RankAnswer]:
        """Append an entry that is answered; wait for each rank's answer, in order of rank."""
        self.append(entry)
        return self.answers()

    def begin_step(self, step: rank_pb2.Step) -> int:
        """Append a step; return its number, by its place in the log."""
        data = rank_pb2.RankEntry(step=step).SerializeToString()
        with self._lock:
            self._send(data)
            return self._steps.begin()

    def begin_draft(self, step: rank_pb2.DraftStep) -> int:
        """Append a draft step; return the number of the last step before it."""
        data = rank_pb2.RankEntry(draft=step).SerializeToString()
        with self._lock:
            self._send(data)
            return self._steps.num_begun

    def end_steps(self, number: int) -> None:
        """The first `number` steps have ended on rank 0."""
        with self._lock:
            self._steps.end(number)

    def end_steps_on_all(self, number: int) -> None:
        """The same of all ranks."""
        with self._lock:
            self._steps.end_on_all(number)

    def finish_steps(self) -> None:
        """Return when every rank has ended the steps that rank 0 has: peers may write into pages of theirs next.

        Not while rank 0 is in a step, which the others wait for.
        """
        with self._lock:
            number = self._steps.to_ask()
            if number is None:
                return
            self._send(rank_pb2.RankEntry(finish_steps=number).SerializeToString())
        self.answers()
        self.end_steps_on_all(number)

    def _send(self, data: bytes) -> None:
        for channel in self._channels:
            channel.send(data)

    def answers(self) -> list[rank_pb2.RankAnswer]:
        """Wait for each rank's next answer."""
        return [rank_pb2.RankAnswer.FromString(answers.recv()) for answers in self._answers]

    def events(self) -> list[rank_pb2.RankEvent]:
        """Return what the ranks reported of transfers since the last call, without waiting."""
        return _received(self._events)

    def restored(self) -> list[int]:
        """Return the numbers of the restores that ranks have ended since the last call, once for each rank."""
        self._sort_restores()
        ended, self._restored = self._restored, []
        return ended

    def loaded(self) -> list[rank_pb2.LoadEnd]:
        """Return the loads from files that ranks have ended since the last call, once for each rank."""
        self._sort_restores()
        ended, self._loaded = self._loaded, []
        return ended

    def loaded_from_store(self) -> list[rank_pb2.LoadEnd]:
        """Return the same of loads from a store."""
        self._sort_restores()
        ended, self._loaded_from_store = self._loaded_from_store, []
        return ended

    def _sort_restores(self) -> None:
        for event in _received(self._restores):
            if event.HasField("loaded"):
                (self._loaded_from_store if event.loaded.is_of_store else self._loaded).append(event.loaded)
            else:
                self._restored.append(event.restored)

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable with news; `events` must then be called until it has none."""
        return (int(self._events.getsockopt(zmq.FD)),)

    def restore_descriptors(self) -> Sequence[int]:
        """The same of `restored`."""
        return (int(self._restores.getsockopt(zmq.FD)),)

    def task_ends(self, task: int) -> list[rank_pb2.TaskEnd]:
        """Wait until every rank has ended a task; return how, in order of rank."""
        ends: list[rank_pb2.TaskEnd] = []
        while len(ends) < self.size - 1:
            end = rank_pb2.TaskEnd.FromString(self._task_ends.recv())
            assert end.task == task, "one task at a time"
            ends.append(end)
        return sorted(ends, key=lambda end: end.rank)

    def close(self) -> None:
        """End the log, for the ranks that are still there.

        A rank in the midst of a step has not read the end yet, and drops it when its channel breaks: so it answers.
        """
        deadline_s = time.monotonic() + END_S
        with self._lock:
            told = [answers for end, answers in zip(self._channels, self._answers, strict=True) if _tell_end(end)]
            for answers in told:
                _wait_for_end(answers, deadline_s)
        for socket in (*self._channels, *self._answers, self._events, self._restores, self._task_ends):
            socket.close(linger=0)


def _tell_end(channel: zmq.Socket[bytes]) -> bool:
    """Return whether a rank is there to hear it."""
    try:
        channel.send(rank_pb2.RankEntry(shutdown=True).SerializeToString(), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _wait_for_end(answers: zmq.Socket[bytes], deadline_s: float) -> None:
    """Skip what a rank has answered before."""
    while answers.poll(int(max(0.0, deadline_s - time.monotonic()) * 1000)):
        if rank_pb2.RankAnswer.FromString(answers.recv()).has_ended:
            return


def _received(socket: zmq.Socket[bytes]) -> list[rank_pb2.RankEvent]:
    events = []
    while True:
        try:
            events.append(rank_pb2.RankEvent.FromString(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return events


class NoRanks:
    """The log of a scheduler without other ranks."""

    size = 1

    def append(self, entry: rank_pb2.RankEntry) -> None:
        pass

    def ask(self, entry: rank_pb2.RankEntry) -> list[rank_pb2.RankAnswer]:
        return []

    def finish_steps(self) -> None:
        pass

    def events(self) -> list[rank_pb2.RankEvent]:
        return []

    def descriptors(self) -> Sequence[int]:
        return ()


def log_of(rank: int) -> str:
    """Return the name of the channel by which a rank gets the log."""
    return str(rank)


def answers_of(rank: int) -> str:
    return f"{rank}-back"


def ids_to_bytes(ids: Sequence[PageId]) -> bytes:
    return b"".join(_ID.pack(*page_id) for page_id in ids)


def ids_from_bytes(data: bytes) -> list[PageId]:
    return [PageId(*fields) for fields in _ID.iter_unpack(data)]


def step_to_wire(batch: ForwardBatch) -> rank_pb2.Step:
    rows = batch.prompt_rows
    return rank_pb2.Step(
        mode=batch.mode.value,
        page_table=batch.page_table.astype("<i4", copy=False).tobytes(),
        prompt_rows=to_bytes(rows.token_rows) if rows is not None else b"",
        is_unfollowed=not batch.is_followed,
        adapters=None if batch.adapters is None else to_bytes(batch.adapters),
        states=None if batch.states is None else _moves_to_wire(batch.states),
        windows=None if batch.window_groups is None else _windows_to_wire(batch.window_groups),
        rope_positions=None if batch.rope_positions is None else to_bytes(batch.rope_positions),
        images=map(_image_to_wire, batch.images),
        embeds=None if batch.embeds is None else _embeds_to_wire(batch.embeds),
        **{name: to_bytes(getattr(batch, name)) for name in _ARRAYS},
    )


def step_from_wire(wire: rank_pb2.Step) -> ForwardBatch:
    arrays = {name: from_bytes(getattr(wire, name)) for name in _ARRAYS}
    prompt_rows = from_bytes(wire.prompt_rows)
    table: I32 = np.frombuffer(wire.page_table, "<i4").reshape(len(arrays["seq_lens"]), -1).copy()
    return ForwardBatch(
        mode=ForwardMode(wire.mode),
        page_table=table,
        prompt_rows=PromptRows(prompt_rows, prompt_rows, 0) if len(prompt_rows) else None,
        states=_moves_from_wire(wire.states) if wire.HasField("states") else None,
        window_groups=_windows_from_wire(wire.windows, len(table)) if wire.HasField("windows") else None,
        input_ids=arrays["input_ids"],
        positions=arrays["positions"],
        out_slots=arrays["out_slots"],
        seq_lens=arrays["seq_lens"],
        extend_lens=arrays["extend_lens"],
        num_sampled=arrays["num_sampled"],
        is_followed=not wire.is_unfollowed,
        adapters=from_bytes(wire.adapters) if wire.HasField("adapters") else None,
        rope_positions=from_bytes(wire.rope_positions).reshape(3, -1) if wire.HasField("rope_positions") else None,
        images=tuple(map(_image_from_wire, wire.images)),
        embeds=_embeds_from_wire(wire.embeds) if wire.HasField("embeds") else None,
    )


def round_to_wire(common: Round, *, is_without_us: bool) -> rank_pb2.CommonRound:
    return rank_pb2.CommonRound(
        num_tokens=[part.num_tokens for part in common.parts],
        num_picked=[part.num_picked for part in common.parts],
        is_without_us=is_without_us,
        is_plain=[part.is_plain for part in common.parts],
        late_tokens=[part.late_tokens for part in common.parts],
        late_picked=[part.late_picked for part in common.parts],
    )


def round_from_wire(wire: rank_pb2.CommonRound) -> Round:
    parts = wire.num_tokens, wire.num_picked, wire.is_plain, wire.late_tokens, wire.late_picked
    return Round(tuple(map(Part, *parts)))


def _image_to_wire(rows: ImageRows) -> rank_pb2.ImageRows:
    image = rows.image
    return rank_pb2.ImageRows(
        key=rows.key,
        height=image.height,
        width=image.width,
        rgb=image.rgb,
        first=rows.first,
        num_rows=rows.num_rows,
        token=rows.token,
    )


def _image_from_wire(wire: rank_pb2.ImageRows) -> ImageRows:
    return ImageRows(wire.key, Image(wire.height, wire.width, wire.rgb), wire.first, wire.num_rows, wire.token)


def _embeds_to_wire(rows: StepRows) -> rank_pb2.StepRows:
    return rank_pb2.StepRows(tokens=to_bytes(rows.tokens), values=rows.values.astype("<f4", copy=False).tobytes())


def _embeds_from_wire(wire: rank_pb2.StepRows) -> StepRows:
    tokens = from_bytes(wire.tokens)
    return StepRows(tokens, np.frombuffer(wire.values, "<f4").reshape(len(tokens), -1).copy())


def draft_to_wire(batch: DraftBatch) -> rank_pb2.DraftStep:
    return rank_pb2.DraftStep(
        token_ids=to_bytes(batch.token_ids),
        positions=to_bytes(batch.positions),
        page_table=batch.page_table.astype("<i4", copy=False).tobytes(),
        num_drafts=to_bytes(batch.num_drafts),
        page_size=batch.page_size,
        missed=[_missed_to_wire(missed) for missed in batch.missed],
    )


def _missed_to_wire(missed: Missed) -> rank_pb2.MissedTokens:
    return rank_pb2.MissedTokens(
        row=missed.row, start=missed.start, token_ids=to_bytes(missed.token_ids), shared_len=missed.shared_len
    )


def draft_from_wire(wire: rank_pb2.DraftStep) -> DraftBatch:
    token_ids = from_bytes(wire.token_ids)
    table: I32 = np.frombuffer(wire.page_table, "<i4").reshape(len(token_ids), -1).copy()
    positions, num_drafts = from_bytes(wire.positions), from_bytes(wire.num_drafts)
    missed = [Missed(each.row, each.start, from_bytes(each.token_ids), each.shared_len) for each in wire.missed]
    return DraftBatch(token_ids, positions, table, num_drafts, wire.page_size, missed)


def _windows_to_wire(windows: WindowGroups) -> rank_pb2.WindowGroups:
    return rank_pb2.WindowGroups(
        num_groups=len(windows.page_tables),
        page_tables=windows.page_tables.astype("<i4", copy=False).tobytes(),
        out_slots=to_bytes(windows.out_slots),
    )


def _windows_from_wire(wire: rank_pb2.WindowGroups, batch_size: int) -> WindowGroups:
    tables = np.frombuffer(wire.page_tables, "<i4").reshape(wire.num_groups, batch_size, -1).copy()
    return WindowGroups(tables, from_bytes(wire.out_slots).reshape(wire.num_groups, -1))


def _moves_to_wire(moves: StateMoves) -> rank_pb2.StateMoves:
    return rank_pb2.StateMoves(
        slots=to_bytes(moves.slots),
        cleared=to_bytes(moves.cleared),
        read_slots=to_bytes(moves.read_slots),
        read_pages=moves.read_pages.astype("<i4", copy=False).tobytes(),
        written_slots=to_bytes(moves.written_slots),
        written_pages=moves.written_pages.astype("<i4", copy=False).tobytes(),
        pages_per_state=moves.read_pages.shape[1],
        late_lens=None if moves.late_lens is None else to_bytes(moves.late_lens),
    )


def _moves_from_wire(wire: rank_pb2.StateMoves) -> StateMoves:
    def pages(raw: bytes) -> I32:
        return np.frombuffer(raw, "<i4").reshape(-1, wire.pages_per_state).copy()

    return StateMoves(
        slots=from_bytes(wire.slots),
        cleared=from_bytes(wire.cleared),
        read_slots=from_bytes(wire.read_slots),
        read_pages=pages(wire.read_pages),
        written_slots=from_bytes(wire.written_slots),
        written_pages=pages(wire.written_pages),
        late_lens=from_bytes(wire.late_lens) if wire.HasField("late_lens") else None,
    )


def copy_to_wire(operation: int, peer: int, write: PageWrite, flow: Flow) -> rank_pb2.CopyPages:
    first_layer, end_layer = write.layers or (0, 0)
    return rank_pb2.CopyPages(
        operation=operation,
        peer=peer,
        src=page_bytes(write.src),
        dst=page_bytes(write.dst),
        first_layer=first_layer,
        end_layer=end_layer,
        skip_tokens=write.skip_tokens,
        as_bytes=write.as_bytes,
        stream=flow.stream,
        priority=flow.priority,
        timeout_s=flow.timeout_s,
        with_digest=flow.with_digest,
    )


def write_from_wire(copy: rank_pb2.CopyPages) -> PageWrite:
    layers = (copy.first_layer, copy.end_layer) if copy.end_layer else None
    return PageWrite(from_bytes(copy.src), from_bytes(copy.dst), layers, copy.skip_tokens, copy.as_bytes)


def flow_from_wire(copy: rank_pb2.CopyPages) -> Flow:
    timeout_s = copy.timeout_s if copy.HasField("timeout_s") else None
    return Flow(copy.stream, copy.priority, timeout_s, copy.with_digest)


def to_bytes(array: I64) -> bytes:
    return array.astype("<i8", copy=False).tobytes()


def page_bytes(pages: PageIndices) -> bytes:
    return to_bytes(np.asarray(pages, np.int64))


def from_bytes(data: bytes) -> I64:
    """Return a writable copy: torch takes no other."""
    return np.frombuffer(data, "<i8").astype(np.int64)
