"""Cuts a step in two, at the end of a request, so that one half computes while tokens of the other travel.

The rule: where the larger half is the smallest, by tokens; the first such place. A step is not cut that has fewer
tokens than a half and another one are worth, nor one in which something counts through all of its tokens or requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.values.batch import ForwardBatch, WindowGroups

Halves = tuple[ForwardBatch, ForwardBatch]


def halves_of(batch: ForwardBatch, least_tokens: int) -> Halves | None:
    """Return both halves of a step of at least so many tokens, neither empty; None: it is computed as one.

    The samples of the second follow those of the first. `least_tokens` 0: no step is cut.
    """
    if not 0 < least_tokens <= len(batch.input_ids) or batch.batch_size < 2 or not _may_be_cut(batch):
        return None
    cut = _middle(batch.extend_lens)
    return _part(batch, slice(0, cut)), _part(batch, slice(cut, None))


def _middle(extend_lens: I64) -> int:
    """Return before which request to cut."""
    ends = np.cumsum(extend_lens)
    return 1 + int(np.argmin(np.maximum(ends, ends[-1] - ends)[:-1]))


def _may_be_cut(batch: ForwardBatch) -> bool:
    """Rows of images and of clients, wanted rows of prompts and insight are told by their numbers in the step."""
    counts = batch.prompt_rows, batch.states, batch.row_lens, batch.embeds, batch.insight
    return all(each is None for each in counts) and not (batch.images or batch.encodes or batch.looks_ahead)


def _part(batch: ForwardBatch, requests: slice) -> ForwardBatch:
    starts = np.concatenate([[0], np.cumsum(batch.extend_lens)])
    chosen = range(batch.batch_size)[requests]
    tokens = slice(int(starts[chosen.start]), int(starts[chosen.stop]))
    windows = batch.window_groups
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
        rope_positions=None if batch.rope_positions is None else batch.rope_positions[:, tokens],
    )
