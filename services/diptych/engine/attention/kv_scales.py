"""What keys and values of each layer are divided by when a pool stores them, and multiplied by when they are read."""

from __future__ import annotations

import torch

from diptych.architectures.config import ModelConfig


def kv_scales(config: ModelConfig, kv_dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return the scales of keys and of values, a pair a layer. Only FP8 has any: wider types hold all magnitudes."""
    if kv_dtype != torch.float8_e4m3fn:
        return [(1.0, 1.0)] * config.num_layers
    return [config.kv_scale(layer) for layer in range(config.num_layers)]
