"""Forward steps and page writes to and from log entries."""

from __future__ import annotations

import numpy as np

from diptych.common.arrays import I32, I64
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows
from diptych.kvtransfer.transport import Flow, PageWrite
from diptych.v1 import rank_pb2


def step_to_wire(batch: ForwardBatch) -> rank_pb2.Step:
    rows = batch.prompt_rows
    return rank_pb2.Step(
        mode=batch.mode.value,
        input_ids=to_bytes(batch.input_ids),
        positions=to_bytes(batch.positions),
        out_slots=to_bytes(batch.out_slots),
        page_table=batch.page_table.astype("<i4", copy=False).tobytes(),
        seq_lens=to_bytes(batch.seq_lens),
        extend_lens=to_bytes(batch.extend_lens),
        num_sampled=to_bytes(batch.num_sampled),
        prompt_rows=to_bytes(rows.token_rows) if rows is not None else b"",
    )


def step_from_wire(wire: rank_pb2.Step) -> ForwardBatch:
    seq_lens, prompt_rows = from_bytes(wire.seq_lens), from_bytes(wire.prompt_rows)
    table: I32 = np.frombuffer(wire.page_table, "<i4").reshape(len(seq_lens), -1).copy()
    return ForwardBatch(
        mode=ForwardMode(wire.mode),
        input_ids=from_bytes(wire.input_ids),
        positions=from_bytes(wire.positions),
        out_slots=from_bytes(wire.out_slots),
        page_table=table,
        seq_lens=seq_lens,
        extend_lens=from_bytes(wire.extend_lens),
        num_sampled=from_bytes(wire.num_sampled),
        prompt_rows=PromptRows(prompt_rows, prompt_rows, 0) if len(prompt_rows) else None,
    )


def copy_to_wire(operation: int, peer: int, write: PageWrite, flow: Flow) -> rank_pb2.CopyPages:
    first_layer, end_layer = write.layers or (0, 0)
    return rank_pb2.CopyPages(
        operation=operation,
        peer=peer,
        src=to_bytes(np.asarray(write.src, np.int64)),
        dst=to_bytes(np.asarray(write.dst, np.int64)),
        first_layer=first_layer,
        end_layer=end_layer,
        skip_tokens=write.skip_tokens,
        stream=flow.stream,
        priority=flow.priority,
        timeout_s=flow.timeout_s,
        with_digest=flow.with_digest,
    )


def write_from_wire(copy: rank_pb2.CopyPages) -> PageWrite:
    layers = (copy.first_layer, copy.end_layer) if copy.end_layer else None
    return PageWrite(from_bytes(copy.src), from_bytes(copy.dst), layers, copy.skip_tokens)


def flow_from_wire(copy: rank_pb2.CopyPages) -> Flow:
    timeout_s = copy.timeout_s if copy.HasField("timeout_s") else None
    return Flow(copy.stream, copy.priority, timeout_s, copy.with_digest)


def to_bytes(array: I64) -> bytes:
    return array.astype("<i8", copy=False).tobytes()


def from_bytes(data: bytes) -> I64:
    """Return a writable copy: torch takes no other."""
    return np.frombuffer(data, "<i8").astype(np.int64)
