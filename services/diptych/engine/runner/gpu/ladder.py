"""Which steps are replayed from graphs, and at which size: pure rules.

A decode step is one graph, captured for one batch size, where a row of several tokens counts as so many rows of one; a
small step with prompts is one graph between each two layers' attention, captured for one number of tokens. A batch runs
in the smallest size that holds it, filled up with rows that read and write nothing. While a step is bound by reading
the weights, such a row costs almost nothing; from 128 rows on arithmetic counts, so the rungs are never further apart
than a quarter of what they hold, or half a prompt of 128.

Rule: what is replayed depends on the batch alone, never on the process, because all tensor-parallel ranks must take the
same way through their collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.values.batch import ForwardBatch, ForwardMode, WindowGroups
from diptych.engine.values.rounds import Round

NO_SLOT: Final = -1  # where a padding row's KV goes, and its state and its adapter are
TOKENS: Final = (16, 32, *range(64, 512, 64), *range(512, 2048, 128))


def ladder(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes of graphs, ascending; the last is `max_batch`."""
    rungs = [size for size in (1, 2, 4, 8) if size < max_batch]
    size = 16
    while size < max_batch:
        rungs.append(size)
        size += 16 if size < 128 else 32
    return (*rungs, max_batch)


def rung_of(batch: ForwardBatch, rungs: Sequence[int]) -> int | None:
    """Return the size of the graph that computes `batch`; None: no graph does."""
    if batch.mode is not ForwardMode.DECODE:
        return None
    if (batch.num_sampled != 1).any() or batch.prompt_rows is not None:
        return None
    return next((rung for rung in rungs if rung >= batch.batch_size), None)


def common_rung_of(common: Round, rungs: Sequence[int]) -> int | None:
    """Return the same for a round of schedulers that share experts: of one size for all, who has no request included.

    None: each computes its step kernel by kernel.
    """
    if not common.are_plain:
        return None
    return next((rung for rung in rungs if rung >= common.num_rows(is_last=False)), None)


def token_ladder(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens of recorded pieces, ascending; the last is `most`. None for 0."""
    return (*(size for size in TOKENS if size < most), most) if most else ()


def token_rung_of(batch: ForwardBatch, rungs: Sequence[int]) -> int | None:
    """Return for how many tokens the pieces are recorded by which to compute `batch`; None: kernel by kernel.

    It has prompts, and perhaps requests that continue.
    """
    if batch.mode is ForwardMode.DECODE or has_rows(batch):
        return None
    return next((rung for rung in rungs if rung >= len(batch.input_ids)), None)


def has_rows(batch: ForwardBatch) -> bool:
    """Whether rows of images, or of clients, stand in place of tokens: what is recorded has no place for any."""
    return bool(batch.images) or batch.embeds is not None


def common_token_rung_of(common: Round, rungs: Sequence[int]) -> int | None:
    """Return the same for a round of schedulers that share experts: for how many tokens all exchange theirs.

    Those that have no token do so kernel by kernel.
    """
    return next((rung for rung in rungs if rung >= common.num_rows(is_last=False)), None)


def fill_up(tokens: I64, size: int, value: int = 0) -> I64:
    """Return what `size` tokens have: `tokens`, and behind them `value`."""
    return _pad(tokens, size - len(tokens), value)


def pad(batch: ForwardBatch, size: int) -> ForwardBatch:
    """Return a decode batch of `size` rows: `batch`, and behind it rows without tokens in the KV pool."""
    missing = size - batch.batch_size
    return ForwardBatch(
        mode=batch.mode,
        input_ids=_pad(batch.input_ids, missing, 0),
        positions=_pad(batch.positions, missing, 0),
        out_slots=_pad(batch.out_slots, missing, NO_SLOT),
        page_table=np.pad(batch.page_table, ((0, missing), (0, 0))),
        seq_lens=_pad(batch.seq_lens, missing, 0),
        extend_lens=_pad(batch.extend_lens, missing, 1),
        num_sampled=_pad(batch.num_sampled, missing, 1),
        states=batch.states and replace(batch.states, slots=_pad(batch.states.slots, missing, NO_SLOT)),
        adapters=None if batch.adapters is None else _pad(batch.adapters, missing, NO_SLOT),
        window_groups=batch.window_groups and _padded(batch.window_groups, missing),
        row_lens=None if batch.row_lens is None else _pad(batch.row_lens, missing, 1),
        rows_before=None if batch.rows_before is None else _pad(batch.rows_before, missing, 0),
        rope_positions=None if batch.rope_positions is None else np.pad(batch.rope_positions, ((0, 0), (0, missing))),
    )


def nobodys(num_window_groups: int) -> ForwardBatch:
    """Return a decode batch without a request."""
    none, tables = np.zeros(0, np.int64), np.zeros((num_window_groups, 0, 1), np.int32)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=none,
        positions=none,
        out_slots=none,
        page_table=np.zeros((0, 1), np.int32),
        seq_lens=none,
        extend_lens=none,
        num_sampled=none,
        window_groups=WindowGroups(tables, tables[:, :, 0].astype(np.int64)) if num_window_groups else None,
    )


def _padded(windows: WindowGroups, missing: int) -> WindowGroups:
    tables = np.pad(windows.page_tables, ((0, 0), (0, missing), (0, 0)))
    return WindowGroups(tables, np.pad(windows.out_slots, ((0, 0), (0, missing)), constant_values=NO_SLOT))


def _pad(array: I64, missing: int, value: int) -> I64:
    return np.concatenate([array, np.full(missing, value, dtype=array.dtype)])
