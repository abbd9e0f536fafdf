"""Gated delta nets: a layer that keeps a matrix for each head, which every token corrects (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.ops import Ops
from diptych.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class DeltaNetBlock:
    """`StateMixer` of `DeltaNet`."""

    ops: Ops

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> DeltaNetBlock:
        raise NotImplementedError

    def project_in(self, buffers: Buffers) -> None:
        raise NotImplementedError

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        raise NotImplementedError

    def project_out(self, buffers: Buffers) -> None:
        raise NotImplementedError
