"""Turns chosen requests into the arrays of a step. No decision is made here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.engine.batch import I32, I64, ForwardBatch, ForwardMode, PromptRows
from diptych.engine.extend_queue import Chunk
from diptych.engine.lora.registry import NO_ADAPTER
from diptych.engine.request import Request
from diptych.engine.sampling_builder import build_sampling


def build_extend(chunks: Sequence[Chunk], page_table: I32, page_size: int, eos_ids: frozenset[int]) -> ForwardBatch:
    """Return the step that computes `chunks`; the last chunk of each prompt is sampled from."""
    requests = [chunk.request for chunk in chunks]
    starts = np.array([request.computed_len for request in requests], dtype=np.int64)
    extend_lens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    spans = zip(requests, starts, extend_lens, strict=True)
    input_ids = np.concatenate([request.tokens[start : start + length] for request, start, length in spans])
    owner = np.repeat(np.arange(len(chunks)), extend_lens)
    positions = np.arange(len(input_ids)) - (np.cumsum(extend_lens) - extend_lens)[owner] + starts[owner]
    table, out_slots = _slots(requests, owner, positions, page_table, page_size)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=input_ids,
        positions=positions,
        out_slots=out_slots,
        page_table=table,
        seq_lens=starts + extend_lens,
        extend_lens=extend_lens,
        sample_rows=np.array([i for i, chunk in enumerate(chunks) if chunk.is_last], dtype=np.int64),
        sampling=build_sampling([chunk.request for chunk in chunks if chunk.is_last], eos_ids),
        prompt_rows=_prompt_rows(chunks),
        adapters=_adapters(requests),
    )


def build_decode(requests: Sequence[Request], page_table: I32, page_size: int, eos_ids: frozenset[int]) -> ForwardBatch:
    """Return the step that computes each request's last token and samples its next."""
    positions = np.array([request.computed_len for request in requests], dtype=np.int64)
    rows = np.arange(len(requests))
    table, out_slots = _slots(requests, rows, positions, page_table, page_size)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=np.array([request.tokens[request.num_tokens - 1] for request in requests], dtype=np.int64),
        positions=positions,
        out_slots=out_slots,
        page_table=table,
        seq_lens=positions + 1,
        extend_lens=np.ones(len(requests), dtype=np.int64),
        sample_rows=rows,
        sampling=build_sampling(requests, eos_ids),
        adapters=_adapters(requests),
    )


def _slots(requests: Sequence[Request], owner: I64, positions: I64, page_table: I32, page_size: int) -> tuple[I32, I64]:
    """Return the requests' part of the page table, and the slot of each new token."""
    rows = np.array([request.row for request in requests], dtype=np.int64)
    table = page_table[rows, : max(request.num_pages for request in requests)]
    pages = table[owner, positions // page_size].astype(np.int64)
    return table, pages * page_size + positions % page_size


def _adapters(requests: Sequence[Request]) -> I64 | None:
    slots = [request.adapter for request in requests]
    return None if max(slots) == NO_ADAPTER else np.array(slots, dtype=np.int64)


def _prompt_rows(chunks: Sequence[Chunk]) -> PromptRows | None:
    """Return the prompt tokens whose log-probabilities are wanted; None if nobody wants any."""
    if all(chunk.request.prompt_logprobs is None for chunk in chunks):
        return None
    token_rows, target_ids, num_top, offset = [], [], 0, 0
    for chunk in chunks:
        request, count = chunk.request, chunk.num_predicted
        if request.prompt_logprobs is not None:
            token_rows.append(np.arange(offset, offset + count))
            target_ids.append(request.tokens[request.computed_len + 1 : request.computed_len + 1 + count])
            num_top = max(num_top, request.prompt_logprobs.num_top)
        offset += chunk.num_tokens
    return PromptRows(np.concatenate(token_rows), np.concatenate(target_ids), num_top)
