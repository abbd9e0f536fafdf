"""What Gemma 4 does at the end of a layer: adds what the token gives this layer, and scales all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Makes what each token gives each layer: by an embedding of its own, and by a projection of the usual one."""

    ops: Ops
    embed: Matrix  # [vocab_size, num_layers * dim]
    project: Matrix  # [num_layers * dim, hidden_size]
    norm: Tensor  # [dim]
    eps: float
    embedding_scale: Tensor  # rounded, as in training
    projection_scale: float

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype) -> PerLayerInputs | None:
        """Return those of a model; None if it has none."""
        if not config.per_layer_dim:
            return None
        return PerLayerInputs(
            ops=ops,
            embed=weights.matrix("embed_per_layer"),
            project=weights.matrix("to_layers"),
            norm=weights.norm("to_layers_norm"),
            eps=config.rms_norm_eps,
            embedding_scale=torch.tensor(config.per_layer_dim**0.5, dtype=dtype),
            projection_scale=config.hidden_size**-0.5,
        )

    def fill(self, input_ids: Tensor, x: Tensor, out: Tensor) -> None:
        """`input_ids` and their embeddings `x`, `[num_tokens, hidden_size]` -> `[num_tokens, num_layers * dim]`."""
        self.project.multiply(x, out)
        out.mul_(self.projection_scale)
        heads = out.view(-1, len(self.norm))
        self.ops.rms_norm(heads, self.norm, self.eps, heads)
        out.add_(self.embed.rows(input_ids).mul_(self.embedding_scale)).mul_(2.0**-0.5)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Lets a layer's tokens choose of what they were given for it."""

    ops: Ops
    gate: Matrix  # [dim, hidden_size]
    up: Matrix  # [hidden_size, dim]
    post_norm: Tensor
    eps: float
    start: int  # of the layer's part of `Buffers.per_layer`,
    end: int

    def add(self, x: Tensor, buffers: Buffers) -> None:
        """Add it to the residual stream `x`, of which `buffers.normed` is a copy."""
        gate = x.new_empty(len(x), self.end - self.start)
        self.gate.multiply(buffers.normed, gate)
        gated, activated = torch.cat((gate, buffers.per_layer[:, self.start : self.end]), dim=1), torch.empty_like(gate)
        self.ops.gelu_tanh_and_mul(gated, activated)
        self.up.multiply(activated, buffers.delta)
        self.ops.rms_norm(buffers.delta, self.post_norm, self.eps, buffers.delta)
        x.add_(buffers.delta)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """Behind the two blocks of a layer."""

    ops: Ops
    given: LayerInput | None
    scale: Tensor  # [1]
    next_norm: Tensor | None  # None: behind a stage of a pipeline
    eps: float

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int, next_norm: Tensor | None) -> LayerEnd:
        eps, dim = config.rms_norm_eps, config.per_layer_dim
        given = None
        if dim:
            gate, up = (weights.matrix(f"{layer}.{name}") for name in ("input_gate", "input_up"))
            post_norm = weights.norm(f"{layer}.input_post_norm")
            given = LayerInput(ops, gate, up, post_norm, eps, layer * dim, (layer + 1) * dim)
        return LayerEnd(ops, given, weights.norm(f"{layer}.scale"), next_norm, eps)

    def finish(self, x: Tensor, buffers: Buffers) -> None:
        """Bring the residual stream `x`, a copy of which is in `buffers.normed`, to its end; norm it into `normed`."""
        if self.given is not None:
            self.given.add(x, buffers)
        x.mul_(self.scale)
        if self.next_norm is not None:
            self.ops.rms_norm(x, self.next_norm, self.eps, buffers.normed)
