"""What the operations of a layer pass on. The next layer overwrites it, so memory is touched once, not once a layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, inner_size


class Widths(NamedTuple):
    """How many numbers of a token a layer has in those buffers that may be wider for others."""

    qkv: int
    attended: int
    gate_up: int
    activated: int

    @staticmethod
    def of_layer(config: ModelConfig, layer: int) -> Widths:
        ffn = config.ffn_size_of(layer)
        return Widths(
            config.qkv_size_of(layer), config.attended_size_of(layer), inner_size(config.activation, ffn), ffn
        )


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
    def allocate(
        config: ModelConfig, widest: Widths, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        qkv, attended, gate_up, activated = widest
        hidden = config.hidden_size
        mixer = config.recurrent.mixer if config.recurrent else None
        mixed = (mixer.in_size, mixer.out_size) if mixer else (0, 0)
        gates, per_layer = attended if config.attention_gate else 0, config.num_layers * config.per_layer_dim
        sizes = (hidden, qkv, gates, attended, *mixed, hidden, gate_up, activated, per_layer)
        return Buffers(*(torch.empty(num_tokens, size, dtype=dtype, device=device) for size in sizes))

    def narrowed(self, widths: Widths) -> Buffers:
        """Return those of a layer with such widths, in the same memory."""
        return replace(self, **{name: _narrow(getattr(self, name), size) for name, size in widths._asdict().items()})

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
