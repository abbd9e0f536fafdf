"""Rotary position embedding: the table of angles. The two halves of a head are rotated against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.engine.loader.config import ModelConfig


def rope_table(config: ModelConfig) -> Tensor:
    """Return `[context_len, 2, head_dim / 2]`, float32: cosines and sines, rounded as transformers does."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_divisors:
        frequencies = frequencies / torch.tensor(config.rope_divisors)
    angles = torch.arange(config.context_len, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)
