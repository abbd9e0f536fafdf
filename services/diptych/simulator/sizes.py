"""The arrays of a step that nobody computes: how many tokens there are of whom, and not where they lie. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from diptych.common.arrays import I32, I64
from diptych.engine.schedule.batch_builder import NOTHING_PENDING
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.step import Step

NOTHING: Final[I64] = np.empty(0, np.int64)
NO_TABLE: Final[I32] = np.empty((0, 0), np.int32)


def sizes_only(
    step: Step,
    page_table: I32,
    page_size: int,
    pending: Mapping[int, int] = NOTHING_PENDING,
    pages_per_state: int = 0,
    window_table: I32 | None = None,
) -> ForwardBatch:
    """Implements `BuildBatch`. In steps that decode there are as many `input_ids` as tokens; else there are none."""
    assert not step.drafts, "nobody drafts here"
    ones = [1] * len(step.decodes)
    ends = [request.computed_len + 1 for request in step.decodes]
    if not step.chunks:
        lens = np.array(ones, np.int64)
        return _batch(ForwardMode.DECODE, lens, np.array(ends, np.int64), lens, lens)
    return _batch(
        ForwardMode.MIXED if step.decodes else ForwardMode.EXTEND,
        NOTHING,
        np.array([*ends, *(chunk.start + chunk.num_tokens for chunk in step.chunks)], np.int64),
        np.array([*ones, *(chunk.num_tokens for chunk in step.chunks)], np.int64),
        np.array([*ones, *(int(chunk.is_last) for chunk in step.chunks)], np.int64),
    )


def _batch(mode: ForwardMode, input_ids: I64, seq_lens: I64, extend_lens: I64, num_sampled: I64) -> ForwardBatch:
    return ForwardBatch(
        mode=mode,
        input_ids=input_ids,
        positions=NOTHING,
        out_slots=NOTHING,
        page_table=NO_TABLE,
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        num_sampled=num_sampled,
    )
