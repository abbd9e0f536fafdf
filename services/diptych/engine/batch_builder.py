"""Turns chosen requests into the arrays of a step. No decision is made here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.engine.batch import I32, I64, ForwardBatch, ForwardMode, SamplingBatch
from diptych.engine.extend_queue import Chunk
from diptych.engine.request import Request


def build_extend(chunks: Sequence[Chunk], page_table: I32, page_size: int) -> ForwardBatch:
    """Return the step that computes `chunks`; the last chunk of each prompt is sampled from."""
    requests = [chunk.request for chunk in chunks]
    starts = np.array([request.computed_len for request in requests], dtype=np.int64)
    extend_lens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    spans = zip(requests, starts, extend_lens, strict=True)
    input_ids = np.concatenate([request.tokens[start : start + length] for request, start, length in spans])
    owner = np.repeat(np.arange(len(chunks)), extend_lens)
    positions = np.arange(len(input_ids)) - (np.cumsum(extend_lens) - extend_lens)[owner] + starts[owner]
    sample_rows = np.array([i for i, chunk in enumerate(chunks) if chunk.is_last], dtype=np.int64)
    return _build(
        ForwardMode.EXTEND, requests, input_ids, positions, owner, extend_lens, sample_rows, page_table, page_size
    )


def build_decode(requests: Sequence[Request], page_table: I32, page_size: int) -> ForwardBatch:
    """Return the step that computes each request's last token and samples its next."""
    batch_size = len(requests)
    input_ids = np.array([request.tokens[request.num_tokens - 1] for request in requests], dtype=np.int64)
    positions = np.array([request.computed_len for request in requests], dtype=np.int64)
    rows = np.arange(batch_size)
    ones = np.ones(batch_size, dtype=np.int64)
    return _build(ForwardMode.DECODE, requests, input_ids, positions, rows, ones, rows, page_table, page_size)


def _build(
    mode: ForwardMode,
    requests: Sequence[Request],
    input_ids: I64,
    positions: I64,
    owner: I64,
    extend_lens: I64,
    sample_rows: I64,
    page_table: I32,
    page_size: int,
) -> ForwardBatch:
    rows = np.array([request.row for request in requests], dtype=np.int64)
    width = max(request.num_pages for request in requests)
    table = page_table[rows, :width]
    starts = np.array([request.computed_len for request in requests], dtype=np.int64)
    pages = table[owner, positions // page_size].astype(np.int64)
    return ForwardBatch(
        mode=mode,
        input_ids=input_ids,
        positions=positions,
        out_slots=pages * page_size + positions % page_size,
        page_table=table,
        seq_lens=starts + extend_lens,
        extend_lens=extend_lens,
        sample_rows=sample_rows,
        sampling=_sampling([requests[row] for row in sample_rows]),
    )


def _sampling(requests: Sequence[Request]) -> SamplingBatch:
    params = [request.params for request in requests]
    return SamplingBatch(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        seeds=np.array([p.seed for p in params], dtype=np.uint64),
        positions=np.array([request.num_tokens for request in requests], dtype=np.int64),
    )
