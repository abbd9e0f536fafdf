"""What the operations of a layer pass on. The next layer overwrites it, so memory is touched once, not once a layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, inner_size


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
    per_layer: Tensor  # [num_tokens, num_layers * per_layer_dim]: what tokens give each layer

    @staticmethod
    def allocate(config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        hidden, layers = config.hidden_size, range(config.num_layers)
        qkv, attended, ffn = (
            max(map(size_of, layers)) for size_of in (config.qkv_size_of, config.attended_size_of, config.ffn_size_of)
        )
        mixer = config.recurrent.mixer if config.recurrent else None
        mixed = (mixer.in_size, mixer.out_size) if mixer else (0, 0)
        gates, per_layer = attended if config.attention_gate else 0, config.num_layers * config.per_layer_dim
        inner = inner_size(config.activation, ffn)
        sizes = (hidden, qkv, gates, attended, *mixed, hidden, inner, ffn, per_layer)
        return Buffers(*(torch.empty(num_tokens, size, dtype=dtype, device=device) for size in sizes))

    def of_layer(self, config: ModelConfig, layer: int) -> Buffers:
        """Return those of a layer, in the same memory: other layers may have wider ones."""
        ffn = config.ffn_size_of(layer)
        return replace(
            self,
            qkv=_narrow(self.qkv, config.qkv_size_of(layer)),
            attended=_narrow(self.attended, config.attended_size_of(layer)),
            gate_up=_narrow(self.gate_up, inner_size(config.activation, ffn)),
            activated=_narrow(self.activated, ffn),
        )

    def picked(self, rows: Tensor) -> Buffers:
        """Return new ones with what layers have found for the tokens `rows`, for those that project it back."""
        found = ("normed", "gates", "attended", "mixed", "per_layer")  # the first by layers that do not look back
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


def _narrow(buffer: Tensor, size: int) -> Tensor:
    """Return `[num_tokens, size]`, contiguous, at the beginning of a buffer."""
    if size == buffer.shape[1]:
        return buffer
    return buffer.flatten()[: len(buffer) * size].view(len(buffer), size)
