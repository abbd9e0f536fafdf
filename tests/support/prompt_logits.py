"""What a model makes of one prompt, by nothing else of the engine than its runner."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.checkpoints.source import keeping_all, open_model
from diptych.engine.models.matrices.dense import CPU
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode

NUM_TOKENS: Final = 40


def prompt_logits(folder: Path, backend: str, quantization: str, device: torch.device = CPU) -> Tensor:
    """Return the logits of a prompt's last token."""
    source = keeping_all(open_model(str(folder)))
    layout = ModelRunner.pool_layout(source.config, num_pages=4, page_size=16, dtype="float32")
    kv = torch.zeros(layout.shape, device=device)
    runner = ModelRunner(source, kv, dtype="float32", quantization=quantization, attention_backend=backend)
    places = np.arange(NUM_TOKENS)
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=np.random.default_rng(0).integers(0, 96, NUM_TOKENS),
        positions=places,
        out_slots=places,
        page_table=np.arange(4, dtype=np.int32)[None],
        seq_lens=np.array([NUM_TOKENS]),
        extend_lens=np.array([NUM_TOKENS]),
        num_sampled=np.ones(1, np.int64),
    )
    return runner.logits(batch)
