"""Steps of one request over pages that follow each other, as no scheduler is needed for them."""

from __future__ import annotations

import numpy as np

from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode

NUM_PAGES = 32


def next_token(runner: ModelRunner, mode: ForwardMode, text: list[int]) -> int:
    """Compute what is new, all of a prompt or the last token of a longer text, and return what is likeliest."""
    first = 0 if mode is ForwardMode.EXTEND else len(text) - 1
    positions = np.arange(first, len(text))
    batch = ForwardBatch(
        mode=mode,
        input_ids=np.array(text[first:]),
        positions=positions,
        out_slots=positions,
        page_table=np.arange(NUM_PAGES, dtype=np.int32)[None],
        seq_lens=np.array([len(text)]),
        extend_lens=np.array([len(positions)]),
        num_sampled=np.ones(1, np.int64),
    )
    return int(runner.logits(batch).argmax())
