"""The Llama architecture: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.attention.backend import AttentionBackend
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.source import ModelSource
from diptych.engine.models import llama_weights
from diptych.engine.models.ops import Matrix, Ops


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a layer's operations pass on, `[num_tokens, ...]`; the next layer overwrites it."""

    normed: Tensor
    qkv: Tensor
    attended: Tensor
    delta: Tensor  # to be added to the residual stream
    gate_up: Tensor
    activated: Tensor

    @staticmethod
    def allocate(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> Buffers:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, ffn = config.hidden_size, config.ffn_size
        sizes = (hidden, q_size + 2 * kv_size, q_size, hidden, 2 * ffn, ffn)
        return Buffers(*(torch.empty(num_tokens, size, dtype=dtype) for size in sizes))


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm: Tensor
    qkv: Matrix
    o: Matrix
    ffn_norm: Tensor
    gate_up: Matrix
    down: Matrix
    next_norm: Tensor  # the next layer's input norm; the last layer's is the model's


class Llama:
    """A loaded model. It keeps no state between steps: the KV pool is the attention backend's."""

    def __init__(self, source: ModelSource, ops: Ops, dtype: torch.dtype) -> None:
        weights = llama_weights.load(source.config, source.tensors(), dtype)
        self._config = source.config
        self._dtype = dtype
        self._ops = ops
        self._embed = ops.matrix(weights.pop("embed"))
        self._lm_head = self._embed if source.config.tie_embeddings else ops.matrix(weights.pop("lm_head"))
        weights[f"{source.config.num_layers}.input_norm"] = weights.pop("norm")
        self._layers = [_layer(weights, index, ops) for index in range(source.config.num_layers)]

    def forward(self, input_ids: Tensor, logits_rows: Tensor, attention: AttentionBackend) -> Tensor:
        """Run `[num_tokens]` new tokens; return the logits `[num_rows, vocab_size]` of the tokens `logits_rows`.

        `attention` was told of the batch before. After the last attention only `logits_rows` are computed.
        """
        x = self._embed.rows(input_ids)
        buffers = Buffers.allocate(self._config, len(x), self._dtype)
        self._ops.rms_norm(x, self._layers[0].input_norm, self._config.rms_norm_eps, buffers.normed)
        for index, layer in enumerate(self._layers):
            layer.qkv.multiply(buffers.normed, buffers.qkv)
            attention.attend(buffers.qkv, index, buffers.attended)
            if layer is self._layers[-1]:
                attended, x = buffers.attended[logits_rows], x[logits_rows]
                buffers = Buffers.allocate(self._config, len(x), self._dtype)
                buffers.attended.copy_(attended)
            self._finish(layer, x, buffers)
        logits = torch.empty(len(x), self._config.vocab_size, dtype=self._dtype)
        self._lm_head.multiply(buffers.normed, logits)
        return logits

    def _finish(self, layer: Layer, x: Tensor, buffers: Buffers) -> None:
        """From what attention found to the next layer's normed input; `x` is the residual stream."""
        ops, eps = self._ops, self._config.rms_norm_eps
        layer.o.multiply(buffers.attended, buffers.delta)
        ops.add_rms_norm(x, buffers.delta, layer.ffn_norm, eps, buffers.normed)
        layer.gate_up.multiply(buffers.normed, buffers.gate_up)
        ops.silu_and_mul(buffers.gate_up, buffers.activated)
        layer.down.multiply(buffers.activated, buffers.delta)
        ops.add_rms_norm(x, buffers.delta, layer.next_norm, eps, buffers.normed)


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
        next_norm=weights[f"{index + 1}.input_norm"],
    )
