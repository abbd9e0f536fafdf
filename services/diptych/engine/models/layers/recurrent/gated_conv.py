"""LFM2's layer without attention: a short convolution between two gates that are linear in a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import ShortConv
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import Found, summands_and
from diptych.engine.models.layers.recurrent.turns import take_turns
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.kernels.slot_rows import SlotRows


@dataclass(frozen=True, slots=True)
class GatedConvBlock:
    """`StateMixer` of `ShortConv`."""

    ops: Ops
    matrix: Matrix  # [3 * num_channels, hidden_size]: gates of what goes in, of what comes out, and that
    bias: Tensor | None
    conv: Tensor  # float32 [num_channels, conv_width]
    conv_bias: Tensor | None  # float32 [num_channels]
    o: Matrix
    o_bias: Tensor | None

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> GatedConvBlock:
        assert config.recurrent is not None
        assert isinstance(config.recurrent.mixer, ShortConv)
        return GatedConvBlock(
            ops=ops,
            matrix=weights.matrix(f"{layer}.mixer_in"),
            bias=weights.vector(f"{layer}.mixer_in_bias"),
            conv=weights.constant(f"{layer}.mixer_conv").squeeze(1),
            conv_bias=weights.vector(f"{layer}.mixer_conv_bias"),
            o=weights.matrix(f"{layer}.mixer_out"),
            o_bias=weights.vector(f"{layer}.mixer_out_bias"),
        )

    def project_in(self, buffers: Buffers) -> None:
        self.matrix.multiply(buffers.normed, buffers.projected)
        if self.bias is not None:
            buffers.projected.add_(self.bias)

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        take_turns(self, projected, state, batch, out)

    def step(self, projected: Tensor, state: tuple[Tensor, ...], rows: SlotRows, out: Tensor) -> None:
        gates_in, gates_out, x = projected.chunk(3, dim=1)
        mixed = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self.ops.state_rules.short_conv(gates_in * x, state[0], rows, self.conv, self.conv_bias, mixed)
        torch.mul(gates_out, mixed.to(out.dtype), out=out)

    def extend(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        gates_in, gates_out, x = projected.chunk(3, dim=1)
        mixed = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self.ops.state_rules.short_conv_prompts(gates_in * x, state[0], batch, self.conv, self.conv_bias, mixed)
        torch.mul(gates_out, mixed.to(out.dtype), out=out)

    def project_out(self, buffers: Buffers) -> Found:
        self.o.multiply(buffers.mixed, buffers.delta)
        return summands_and(self.o_bias)
