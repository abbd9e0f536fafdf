"""Rounds of two schedulers that share experts: steps of every kind beside each other, and a pool for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.checkpoints.shard import Shard
from diptych.checkpoints.source import ModelSource
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode

PAGE, PAGES = 4, 6  # tokens of a page, and pages of a request
MOST = 3  # requests of a scheduler
PREFILL, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


def step(mode: ForwardMode, texts: Sequence[tuple[int, int]], new: int = 1) -> ForwardBatch:
    """Return a step of requests by their number and how many tokens they have before: `new` more of each."""
    positions = np.concatenate([np.arange(before, before + new) for _, before in texts])
    owners = np.repeat([number for number, _ in texts], new)
    return ForwardBatch(
        mode=mode,
        input_ids=(7 * positions + 31 * owners) % 50 + 2,
        positions=positions,
        out_slots=owners * PAGES * PAGE + positions,
        page_table=np.array([np.arange(PAGES) + number * PAGES for number, _ in texts], np.int32),
        seq_lens=np.array([before + new for _, before in texts]),
        extend_lens=np.full(len(texts), new),
        num_sampled=np.ones(len(texts), np.int64),
    )


Steps = tuple[ForwardBatch | None, ForwardBatch | None]  # of both schedulers in a round; None: it is idle
ROUNDS: list[Steps] = [
    (step(PREFILL, [(0, 0), (1, 0), (2, 0)], 5), None),
    (step(DECODE, [(0, 5), (1, 5)]), step(PREFILL, [(0, 0)], 4)),
    (step(DECODE, [(0, 6), (1, 6)]), step(DECODE, [(0, 4)])),  # the graph of 4 rows is captured, with two
    (step(DECODE, [(0, 7), (1, 7), (2, 5)]), step(DECODE, [(0, 5)])),
    (step(DECODE, [(0, 8), (1, 8), (2, 6)]), None),
    (None, step(DECODE, [(0, 6)])),  # the graph of one row
    (None, step(DECODE, [(0, 7)])),
    (step(DECODE, [(2, 7)]), None),
    (step(DECODE, [(2, 8)]), step(PREFILL, [(1, 0), (2, 0)], 3)),
    (step(PREFILL, [(0, 9)], 7), step(PREFILL, [(0, 8), (1, 3)], 2)),
    (step(PREFILL, [(1, 9)], 9), None),
    (step(PREFILL, [(0, 0), (1, 0)], 10), step(DECODE, [(2, 3)])),  # more than is recorded
]


def new_pool(source: ModelSource, num_ranks: int = 1) -> Tensor:
    num_pages = MOST * PAGES
    part = Shard(0, num_ranks).config(source.config)
    layout = ModelRunner.pool_layout(part, num_pages=num_pages, page_size=PAGE, dtype="float32")
    return torch.full(layout.shape, torch.nan)
