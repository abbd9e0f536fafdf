"""What attention knows of a model's layers: tables of angles, and scales of the keys and values that a pool stores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Rope

Ropes = Mapping[Rope, Tensor]  # a table each, see `rope_tables`


def kv_scales(config: ModelConfig, kv_dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return what stored keys and values are divided by, and multiplied by when they are read: a pair a layer.

    Only FP8 has any: wider types hold all magnitudes.
    """
    if kv_dtype != torch.float8_e4m3fn:
        return [(1.0, 1.0)] * config.num_layers
    return [config.kv_scale(config.source(layer)) for layer in range(config.num_layers)]


def new_sinks(config: ModelConfig, device: torch.device) -> Tensor | None:
    """Return where the sinks of all layers go, `[num_layers, num_heads]` float32; None for a model without.

    Layers of a kind lie together, in the order of `layers_by_kind`.

    A sink is a learned score of a head that takes part in its softmax and has no value. They are weights: backends are
    built on this memory before it is filled.
    """
    return torch.zeros(config.num_layers, config.num_heads, device=device) if config.sinks else None


def rope_tables(config: ModelConfig, kv: Tensor) -> dict[Rope, Tensor]:
    """Return a table for each kind of layer, as long as a request that the pool `kv` can hold, and beside it.

    Requests have whole pages, so steps that are run before any request comes may fill a context's last one. The two
    halves of a head are rotated against each other. Backends of several kinds of layers share what is made of their
    whole model.
    """
    num_pages, page_size = kv.shape[0], kv.shape[3]
    num_positions = min(num_pages, -(-config.context_len // page_size)) * page_size
    ropes = {config.rope_of(layer) for layer in range(config.num_layers)}
    return {rope: angle_table(rope, num_positions).to(kv.device) for rope in ropes}


def angle_table(rope: Rope, num_positions: int) -> Tensor:
    """Return `[num_positions, 2, dim / 2]`, float32: cosines and sines, rounded as transformers does."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * rope.scale
