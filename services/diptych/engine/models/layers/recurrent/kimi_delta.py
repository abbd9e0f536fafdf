"""Kimi's delta attention: a layer whose heads keep a matrix each, which decays by channels (arXiv 2510.26692)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import KimiDelta
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.turns import take_turns
from diptych.engine.models.layers.routing import logistic
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.kernels.slot_rows import SlotRows


@dataclass(frozen=True, slots=True)
class KimiDeltaBlock:
    """`StateMixer` of `KimiDelta`. Decays and output gates are made by two narrow matrices each."""

    ops: Ops
    mixer: KimiDelta
    qkv_betas: Matrix  # [(3 * head_dim + 1) * num_heads, hidden_size]
    low: Matrix  # [2 * head_dim, hidden_size]: of decays, then of gates
    decays: Matrix  # [num_heads * head_dim, head_dim]
    gates: Matrix
    conv: Tensor  # float32 [num_heads * 3 * head_dim, conv_width], as the state has the channels
    decay: Decay
    norm: Tensor  # [head_dim]
    norm_eps: float
    o: Matrix

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> KimiDeltaBlock:
        assert config.recurrent is not None
        mixer = config.recurrent.mixer
        assert isinstance(mixer, KimiDelta)
        conv = weights.constant(f"{layer}.mixer_conv").view(3, mixer.num_heads, mixer.head_dim, mixer.conv_width)
        rate, bias = weights.constant(f"{layer}.decay_rate_log").exp(), weights.constant(f"{layer}.decay_bias")
        return KimiDeltaBlock(
            ops=ops,
            mixer=mixer,
            qkv_betas=weights.matrix(f"{layer}.mixer_in"),
            low=weights.matrix(f"{layer}.mixer_low"),
            decays=weights.matrix(f"{layer}.mixer_decays"),
            gates=weights.matrix(f"{layer}.mixer_gates"),
            conv=conv.transpose(0, 1).reshape(-1, mixer.conv_width),
            decay=Decay(rate, bias.view(mixer.num_heads, mixer.head_dim)),
            norm=weights.norm(f"{layer}.mixer_norm"),
            norm_eps=config.rms_norm_eps,
            o=weights.matrix(f"{layer}.mixer_out"),
        )

    def project_in(self, buffers: Buffers) -> None:
        """`projected` becomes queries, keys, values, betas, decays, gates."""
        x, rank = buffers.normed, self.mixer.head_dim
        projected = torch.split(buffers.projected, self._sizes, dim=1)
        low = x.new_empty(len(x), 2 * rank)
        self.low.multiply(x, low)
        given = (x, low[:, :rank].contiguous(), low[:, rank:].contiguous())
        for matrix, each, place in zip((self.qkv_betas, self.decays, self.gates), given, projected, strict=True):
            product = x.new_empty(place.shape)
            matrix.multiply(each, product)
            place.copy_(product)

    @property
    def _sizes(self) -> list[int]:
        size = self.mixer.out_size
        return [3 * size + self.mixer.num_heads, size, size]

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        take_turns(self, projected, state, batch, out)

    def step(self, projected: Tensor, state: tuple[Tensor, ...], rows: SlotRows, out: Tensor) -> None:
        (conv, kept), rules = state, self.ops.state_rules
        qkv, betas, decays, gates = self._parts(projected)
        mixed, read = (torch.empty(each.shape, dtype=torch.float32, device=out.device) for each in (qkv, gates))
        channels = conv.view(len(conv), *self.conv[:, 1:].shape)
        rules.short_conv(qkv.flatten(1), channels, rows, self.conv, None, mixed.flatten(1))
        rules.kimi_delta(mixed, decays, betas, self.decay, kept, rows, read)
        out.copy_(self._gated(read, gates))

    def extend(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        (conv, kept), rules = state, self.ops.state_rules
        qkv, betas, decays, gates = self._parts(projected)
        mixed, read = (torch.empty(each.shape, dtype=torch.float32, device=out.device) for each in (qkv, gates))
        channels = conv.view(len(conv), *self.conv[:, 1:].shape)
        rules.short_conv_prompts(qkv.flatten(1), channels, batch, self.conv, None, mixed.flatten(1))
        rules.kimi_delta_prompts(mixed, decays, betas, self.decay, kept, batch, read)
        out.copy_(self._gated(read, gates))

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what `project_in` made, by heads: `[num_tokens, num_heads, ...]`."""
        mixer, num_tokens = self.mixer, len(projected)
        sizes = [3 * mixer.out_size, mixer.num_heads, *self._sizes[1:]]
        qkv, betas, *others = torch.split(projected, sizes, dim=1)
        by_heads = qkv.reshape(num_tokens, 3, mixer.num_heads, mixer.head_dim).transpose(1, 2).flatten(2)
        decays, gates = (each.reshape(num_tokens, mixer.num_heads, mixer.head_dim) for each in others)
        return by_heads, betas, decays, gates

    def _gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """Norm each head of `read`, float32 `[num_tokens, num_heads, head_dim]`; return them gated, one vector."""
        normed = read * read.pow(2).mean(-1, keepdim=True).add_(self.norm_eps).rsqrt_()
        return normed.mul_(self.norm.float()).mul_(logistic(gates.float())).flatten(1)

    def project_out(self, buffers: Buffers) -> Found:
        self.o.multiply(buffers.mixed, buffers.delta)
        return SUMMANDS
