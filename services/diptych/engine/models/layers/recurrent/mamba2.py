"""Mamba 2: a layer of state spaces behind a short convolution (arXiv 2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import Mamba2
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.delta_rule import silu
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.engine.models.layers.recurrent.turns import take_turns
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.kernels.slot_rows import SlotRows


@dataclass(frozen=True, slots=True)
class Mamba2Block:
    """`StateMixer` of `Mamba2`."""

    ops: Ops
    mixer: Mamba2
    matrix: Matrix  # [in_size, hidden_size]
    conv: Tensor  # float32 [num_groups * group_channels, conv_width], as the state has the channels
    conv_bias: Tensor | None  # float32 [num_groups * group_channels]
    heads: Heads
    norm: Tensor  # [num_heads * head_dim]
    norm_eps: float
    o: Matrix

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Mamba2Block:
        assert config.recurrent is not None
        mixer = config.recurrent.mixer
        assert isinstance(mixer, Mamba2)
        bias = weights.vector(f"{layer}.mixer_conv_bias")
        return Mamba2Block(
            ops=ops,
            mixer=mixer,
            matrix=weights.matrix(f"{layer}.mixer_in"),
            conv=_by_groups(weights.constant(f"{layer}.mixer_conv").squeeze(1).T, mixer).flatten(1).T.contiguous(),
            conv_bias=None if bias is None else _by_groups(bias[None], mixer).flatten(),
            heads=_heads(weights, layer, mixer),
            norm=weights.norm(f"{layer}.mixer_norm"),
            norm_eps=config.rms_norm_eps,
            o=weights.matrix(f"{layer}.mixer_out"),
        )

    def project_in(self, buffers: Buffers) -> None:
        self.matrix.multiply(buffers.normed, buffers.projected)

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        take_turns(self, projected, state, batch, out)

    def step(self, projected: Tensor, state: tuple[Tensor, ...], rows: SlotRows, out: Tensor) -> None:
        (conv, kept), rules = state, self.ops.state_rules
        gates, channels, lengths = self._parts(projected)
        mixed = torch.empty(channels.shape, dtype=torch.float32, device=out.device)
        flat = conv.view(len(conv), *self.conv[:, 1:].shape)
        rules.short_conv(channels.flatten(1), flat, rows, self.conv, self.conv_bias, mixed.flatten(1))
        read = self._new_read(projected)
        rules.mamba2(mixed, lengths, self.heads, kept, rows, read)
        out.copy_(self._gated(read, gates))

    def extend(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        (conv, kept), rules = state, self.ops.state_rules
        gates, channels, lengths = self._parts(projected)
        mixed = torch.empty(channels.shape, dtype=torch.float32, device=out.device)
        flat = conv.view(len(conv), *self.conv[:, 1:].shape)
        rules.short_conv_prompts(channels.flatten(1), flat, batch, self.conv, self.conv_bias, mixed.flatten(1))
        read = self._new_read(projected)
        rules.mamba2_prompts(mixed, lengths, self.heads, kept, batch, read)
        out.copy_(self._gated(read, gates))

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gates, the channels of each group, and steps."""
        mixer = self.mixer
        sizes = [mixer.out_size, mixer.num_groups * mixer.group_channels, mixer.num_heads]
        gates, channels, lengths = torch.split(projected, sizes, dim=1)
        return gates, _by_groups(channels, mixer), lengths

    def _new_read(self, projected: Tensor) -> Tensor:
        shape = (len(projected), self.mixer.num_heads, self.mixer.head_dim)
        return torch.empty(shape, dtype=torch.float32, device=projected.device)

    def _gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """Return `read`, float32 `[num_tokens, num_heads, head_dim]`, gated and then normed by groups, one vector."""
        gated = read.flatten(1).mul_(silu(gates.float())).view(len(read), self.mixer.num_groups, -1)
        scales = gated.pow(2).mean(-1, keepdim=True).add_(self.norm_eps).rsqrt_()
        return gated.mul_(scales).flatten(1).mul_(self.norm.float())

    def project_out(self, buffers: Buffers) -> Found:
        self.o.multiply(buffers.mixed, buffers.delta)
        return SUMMANDS


def _by_groups(channels: Tensor, mixer: Mamba2) -> Tensor:
    """Return heads and the two vectors of all groups, `[n, channels]`, as `[n, num_groups, group_channels]`."""
    vectors = mixer.num_groups * mixer.state_size
    parts = torch.split(channels, [mixer.out_size, vectors, vectors], dim=1)
    return torch.cat([each.reshape(len(each), mixer.num_groups, -1) for each in parts], dim=2)


def _heads(weights: Weights, layer: int, mixer: Mamba2) -> Heads:
    rate, bias, skip = (
        weights.constant(f"{layer}.{name}").view(mixer.num_groups, -1)
        for name in ("decay_rate_log", "step_bias", "mixer_skip")
    )
    return Heads(rate.exp().neg_(), bias, skip, mixer.min_step, mixer.head_dim)
