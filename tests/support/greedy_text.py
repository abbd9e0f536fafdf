"""Greedy text of a model in a file or folder, and nothing else of the engine than its runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode

CPU: Final = torch.device("cpu")


def generate(
    model: Path,
    prompt: Sequence[int],
    quantization: str = "auto",
    backend: str = "auto",
    device: torch.device = CPU,
    num_tokens: int = 12,
) -> list[int]:
    """Return `prompt` and the tokens that follow it, computed in float32."""
    source = open_model(str(model))
    layout = ModelRunner.pool_layout(source.config, num_pages=8, page_size=16, dtype="float32")
    kv = torch.zeros(layout.shape, device=device)
    runner = ModelRunner(source, kv, dtype="float32", quantization=quantization, attention_backend=backend)
    tokens, start = list(prompt), 0
    for _ in range(num_tokens):
        batch = _batch(tokens, start)
        start = len(tokens)
        tokens.append(int(runner.logits(batch).argmax()))
    return tokens


def _batch(tokens: Sequence[int], start: int) -> ForwardBatch:
    positions = np.arange(start, len(tokens))
    return ForwardBatch(
        mode=ForwardMode.DECODE if start else ForwardMode.EXTEND,
        input_ids=np.array(tokens[start:]),
        positions=positions,
        out_slots=positions,
        page_table=np.arange(8, dtype=np.int32)[None],
        seq_lens=np.array([len(tokens)]),
        extend_lens=np.array([len(positions)]),
        num_sampled=np.ones(1, np.int64),
    )
