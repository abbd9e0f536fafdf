"""What the operations of a layer pass on. The next layer overwrites it, so memory is touched once, not once a layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Buffers:
    """All are `[num_tokens, ...]`."""

    normed: Tensor
    qkv: Tensor
    attended: Tensor
    delta: Tensor  # to be added to the residual stream
    gate_up: Tensor
    activated: Tensor

    @staticmethod
    def allocate(config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        hidden, ffn = config.hidden_size, config.ffn_size
        sizes = (hidden, config.qkv_size, config.num_heads * config.value_dim, hidden, 2 * ffn, ffn)
        return Buffers(*(torch.empty(num_tokens, size, dtype=dtype, device=device) for size in sizes))

    def first(self, num_tokens: int) -> Buffers:
        """Return those of fewer tokens, in the same memory."""
        return Buffers(*(getattr(self, each.name)[:num_tokens] for each in fields(self)))
