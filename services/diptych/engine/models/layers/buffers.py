"""What the operations of a layer pass on. The next layer overwrites it, so memory is touched once, not once a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.engine.loader.config import ModelConfig


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
    def allocate(config: ModelConfig, states: Tensor) -> Buffers:
        """Return those of a step with so many `states` `[num_tokens, hidden_size]`, of their dtype and device."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, ffn = config.hidden_size, config.ffn_size
        sizes = (hidden, q_size + 2 * kv_size, q_size, hidden, 2 * ffn, ffn)
        return Buffers(*(states.new_empty(len(states), size) for size in sizes))
