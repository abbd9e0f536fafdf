"""Cuts a step in two, at the end of a request, so that one half computes while tokens of the other travel.

The rule: where the larger half is the smallest, by tokens; the first such place. A step is not cut that has fewer
tokens than it pays for, nor one in which something is told by its place among all tokens of the step. The scheduler
decides; whoever computes the step is told how many tokens the second half has, and cuts there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diptych.engine.values.batch import ForwardBatch, WindowGroups


def late_tokens(batch: ForwardBatch, least_tokens: int) -> int:
    """Return how many tokens the second half of a step has; 0: it is computed as one.

    No step of fewer than `least_tokens` is cut; 0: none is.
    """
    if not 0 < least_tokens <= len(batch.input_ids) or batch.batch_size < 2 or not _may_be_cut(batch):
        return 0
    ends = np.cumsum(batch.extend_lens)
    num_late = ends[-1] - ends[:-1]
    return int(num_late[np.argmin(np.maximum(ends[:-1], num_late))])


def _may_be_cut(batch: ForwardBatch) -> bool:
    places = batch.prompt_rows, batch.states, batch.row_lens, batch.embeds, batch.insight
    return all(each is None for each in places) and not (batch.images or batch.encodes or batch.looks_ahead)


def halves(batch: ForwardBatch, num_late: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Return a step without the requests that have its last `num_late` tokens, and these.

    The samples of the second half follow those of the first.
    """
    first = len(batch.input_ids) - num_late
    cut = int(np.searchsorted(np.cumsum(batch.extend_lens), first)) + 1
    assert batch.extend_lens[:cut].sum() == first, "a request is in one half"
    return _part(batch, slice(0, cut), slice(0, first)), _part(batch, slice(cut, None), slice(first, None))


def _part(batch: ForwardBatch, requests: slice, tokens: slice) -> ForwardBatch:
    windows, axes = batch.window_groups, batch.rope_positions
    return replace(
        batch,
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        out_slots=batch.out_slots[tokens],
        page_table=batch.page_table[requests],
        seq_lens=batch.seq_lens[requests],
        extend_lens=batch.extend_lens[requests],
        num_sampled=batch.num_sampled[requests],
        adapters=None if batch.adapters is None else batch.adapters[requests],
        window_groups=windows and WindowGroups(windows.page_tables[:, requests], windows.out_slots[:, tokens]),
        rows_before=None if batch.rows_before is None else batch.rows_before[tokens],
        rope_positions=None if axes is None else np.ascontiguousarray(axes[:, tokens]),
    )
