"""Steps as a scheduler would plan them, of requests that are all alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch

PAGE_SIZE: Final = 16


def extend_batch(extend_len: int, num_pages: int, *, batch_size: int = 1, prefix_len: int = 0) -> ForwardBatch:
    """Prompts of `extend_len` new tokens each behind a cached prefix, in a pool of `num_pages`."""
    return _batch(ForwardMode.EXTEND, batch_size, extend_len, prefix_len + extend_len, num_pages)


def decode_batch(batch_size: int, context: int, num_pages: int) -> ForwardBatch:
    """One new token for each request, which has `context` tokens with it."""
    return _batch(ForwardMode.DECODE, batch_size, 1, context, num_pages)


def rows_batch(batch_size: int, row_len: int, context: int, num_pages: int) -> ForwardBatch:
    """A row of new tokens for each request, which has `context` tokens with them; one is sampled behind each."""
    batch = _batch(ForwardMode.DECODE, batch_size, row_len, context, num_pages)
    return replace(batch, num_sampled=batch.extend_lens)


def _batch(mode: ForwardMode, batch_size: int, extend_len: int, seq_len: int, num_pages: int) -> ForwardBatch:
    """Pages are scattered over the pool, as they are after some time of serving."""
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    table = pages[: batch_size * -(-seq_len // PAGE_SIZE)].reshape(batch_size, -1)
    positions = np.tile(np.arange(seq_len - extend_len, seq_len), batch_size)
    owner = np.repeat(np.arange(batch_size), extend_len)
    return ForwardBatch(
        mode=mode,
        input_ids=np.arange(len(positions)) % 1000 + 1000,
        positions=positions,
        out_slots=table[owner, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE,
        page_table=table,
        seq_lens=_full(batch_size, seq_len),
        extend_lens=_full(batch_size, extend_len),
        num_sampled=np.ones(batch_size, np.int64),
    )


def greedy(batch_size: int) -> SamplingBatch:
    zeros = _full(batch_size, 0)
    return SamplingBatch(
        temperature=np.zeros(batch_size, np.float32),
        top_p=np.ones(batch_size, np.float32),
        top_k=zeros,
        seeds=zeros.astype(np.uint64),
        positions=zeros,
    )


def _full(length: int, value: int) -> I64:
    return np.full(length, value, np.int64)
