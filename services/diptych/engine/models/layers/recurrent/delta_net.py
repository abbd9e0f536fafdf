"""Gated delta nets: a layer that keeps a matrix for each head, which every token corrects (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import DeltaNet
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


@dataclass(frozen=True, slots=True)
class DeltaNetBlock:
    """`StateMixer` of `DeltaNet`."""

    ops: Ops
    matrix_in: Matrix  # [in_size, hidden_size]
    rule: DeltaRule
    matrix_out: Matrix  # [hidden_size, out_size]

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> DeltaNetBlock:
        assert config.recurrent is not None
        assert isinstance(config.recurrent.mixer, DeltaNet)
        net = config.recurrent.mixer
        return DeltaNetBlock(
            ops=ops,
            matrix_in=weights.matrix(f"{layer}.mixer_in"),
            rule=ops.delta_rule(net, _weights(config, net, weights, layer)),
            matrix_out=weights.matrix(f"{layer}.mixer_out"),
        )

    def project_in(self, buffers: Buffers) -> None:
        self.matrix_in.multiply(buffers.normed, buffers.projected)

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        self.rule.mix(projected, state, batch, out)

    def project_out(self, buffers: Buffers) -> Found:
        self.matrix_out.multiply(buffers.mixed, buffers.delta)
        return SUMMANDS


def _weights(config: ModelConfig, net: DeltaNet, weights: Weights, layer: int) -> DeltaWeights:
    conv, decay_log, decay_bias, norm = (
        weights.vector(f"{layer}.{name}") for name in ("conv", "decay_log", "decay_bias", "mixer_norm")
    )
    assert conv is not None
    assert decay_log is not None
    assert decay_bias is not None
    assert norm is not None  # to which no offset is added
    conv = conv.view(net.num_channels, net.conv_width)
    return DeltaWeights(conv, decay_log.exp().neg(), decay_bias, norm, config.rms_norm_eps)
