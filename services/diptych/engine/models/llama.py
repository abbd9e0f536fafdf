"""The Llama architecture: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.attention.backend import AttentionBackend
from diptych.engine.loader.source import ModelSource
from diptych.engine.models import llama_weights
from diptych.engine.models.ops import Matrix, Ops


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm: Tensor
    qkv: Matrix
    o: Matrix
    ffn_norm: Tensor
    gate_up: Matrix
    down: Matrix


class Llama:
    """A loaded model. It keeps no state between steps: the KV pool is the attention backend's."""

    def __init__(self, source: ModelSource, ops: Ops, dtype: torch.dtype) -> None:
        weights = llama_weights.load(source.config, source.tensors(), dtype)
        self._eps = source.config.rms_norm_eps
        self._ops = ops
        self._embed = ops.matrix(weights.pop("embed"))
        self._lm_head = self._embed if source.config.tie_embeddings else ops.matrix(weights.pop("lm_head"))
        self._norm = weights.pop("norm")
        self._layers = [_layer(weights, index, ops) for index in range(source.config.num_layers)]

    def forward(self, input_ids: Tensor, logits_rows: Tensor, attention: AttentionBackend) -> Tensor:
        """Run `[num_tokens]` new tokens; return the logits `[num_rows, vocab_size]` of the tokens `logits_rows`.

        `attention` was told of the batch before. Layers after the last attention run on `logits_rows` alone.
        """
        ops, eps, last = self._ops, self._eps, self._layers[-1]
        x = self._embed.rows(input_ids)
        normed = ops.rms_norm(x, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = attention.attend(layer.qkv(normed), index)
            if layer is last:
                attended, x = attended[logits_rows], x[logits_rows]
            normed = ops.add_rms_norm(x, layer.o(attended), layer.ffn_norm, eps)
            delta = layer.down(ops.silu_and_mul(layer.gate_up(normed)))
            next_norm = self._norm if layer is last else self._layers[index + 1].input_norm
            normed = ops.add_rms_norm(x, delta, next_norm, eps)
        return self._lm_head(normed)


def _layer(weights: dict[str, Tensor], index: int, ops: Ops) -> Layer:
    """Take one layer out of `weights`, so that its old copy is freed before the next is laid out."""

    def matrix(name: str) -> Matrix:
        return ops.matrix(weights.pop(f"{index}.{name}"))

    return Layer(
        input_norm=weights.pop(f"{index}.input_norm"),
        qkv=matrix("qkv"),
        o=matrix("o"),
        ffn_norm=weights.pop(f"{index}.ffn_norm"),
        gate_up=matrix("gate_up"),
        down=matrix("down"),
    )
