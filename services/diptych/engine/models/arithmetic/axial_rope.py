"""Rotation by time, height and width of what a token stands for (M-RoPE, arXiv 2409.12191).

Each pair of dimensions turns by one of the three. A token of text has one place for all of them, and turns as it would
by itself. Attention, which knows nothing of it, finds queries and keys turned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.attention.torch_backend import rotate

Turns = tuple[Tensor, Tensor]  # cosines and sines, `[num_tokens, 1, dim / 2]`, float32


class AxialRope:
    """Computes the turns of a step once for all layers of a model."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        assert config.mrope is not None
        rope = config.rope
        exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
        frequencies = 1.0 / (rope.theta**exponents)
        if rope.divisors:
            frequencies = frequencies / torch.tensor(rope.divisors)
        self._scale = rope.scale
        self._frequencies = frequencies.to(device)
        self._axes = torch.tensor(config.mrope.axes(), device=device)
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim

    def turns(self, batch: StagedBatch) -> Turns:
        """Return what turns the tokens of a step."""
        places = batch.rope_positions
        if places is None:  # text alone
            angles = batch.positions[:, None].float() * self._frequencies
        else:
            angles = places[self._axes].transpose(0, 1).float() * self._frequencies
        return angles.cos()[:, None] * self._scale, angles.sin()[:, None] * self._scale

    def apply(self, qkv: Tensor, turns: Turns) -> None:
        """Turn queries and keys of `[num_tokens, qkv_size]` in place."""
        rotate(qkv.view(len(qkv), -1, self._head_dim)[:, : self._num_rotated], *turns)
