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
    gates: Tensor  # of `attended`, in models whose attention has them
    attended: Tensor
    projected: Tensor  # what a recurrent layer mixes with its state
    mixed: Tensor
    delta: Tensor  # to be added to the residual stream
    gate_up: Tensor
    activated: Tensor

    @staticmethod
    def allocate(config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        hidden, ffn = config.hidden_size, config.ffn_size
        mixer = config.recurrent.mixer if config.recurrent else None
        mixed = (mixer.in_size, mixer.out_size) if mixer else (0, 0)
        attended = config.num_heads * config.value_dim
        gates = attended if config.attention_gate else 0
        sizes = (hidden, config.qkv_size, gates, attended, *mixed, hidden, 2 * ffn, ffn)
        return Buffers(*(torch.empty(num_tokens, size, dtype=dtype, device=device) for size in sizes))

    def picked(self, rows: Tensor) -> Buffers:
        """Return new ones with what layers have found for the tokens `rows`, for those that project it back."""
        found = ("gates", "attended", "mixed")
        of_rows = {each.name: getattr(self, each.name) for each in fields(self)}
        return Buffers(
            **{
                name: each[rows] if name in found else each.new_empty(len(rows), each.shape[1])
                for name, each in of_rows.items()
            }
        )

    def first(self, num_tokens: int) -> Buffers:
        """Return those of fewer tokens, in the same memory."""
        return Buffers(*(getattr(self, each.name)[:num_tokens] for each in fields(self)))
