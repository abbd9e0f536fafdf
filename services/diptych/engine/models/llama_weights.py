"""Places a Llama checkpoint's tensors into the matrices that the forward pass multiplies.

q, k and v are one matrix, gate and up another: fewer, larger multiplications. Each tensor is copied to its rows as it
is read, so a checkpoint is never in memory twice. Unknown, missing and misshapen tensors are errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.gguf import Array


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one tensor of the checkpoint goes: rows `[start, start + shape[0])` of `target`."""

    target: str
    start: int
    shape: tuple[int, ...]


def load(config: ModelConfig, tensors: Iterable[tuple[str, Array]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the merged weights by target name: `embed`, `norm`, `lm_head` and `0.qkv`, `0.o`, ... for each layer."""
    pieces = dict(placement(config))
    targets = {name: torch.empty(shape, dtype=dtype) for name, shape in _target_shapes(pieces.values()).items()}
    for name, array in tensors:
        piece = pieces.pop(name, None)
        if piece is None:
            raise ConfigError(f"{config.model_id}: tensor {name!r} has no place in this model, or comes twice")
        if array.shape != piece.shape:
            raise ConfigError(f"{config.model_id}: {name} is {array.shape}, the configuration says {piece.shape}")
        targets[piece.target][piece.start : piece.start + piece.shape[0]].copy_(_tensor(array))
    if pieces:
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {', '.join(sorted(pieces)[:5])}")
    return targets


def placement(config: ModelConfig) -> Iterator[tuple[str, Piece]]:
    """Yield where each tensor of a complete checkpoint goes."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", Piece("embed", 0, (vocab, hidden))
    yield "model.norm.weight", Piece("norm", 0, (hidden,))
    if not config.tie_embeddings:
        yield "lm_head.weight", Piece("lm_head", 0, (vocab, hidden))
    for layer in range(config.num_layers):
        for name, piece in _layer_placement(config):
            yield f"model.layers.{layer}.{name}.weight", Piece(f"{layer}.{piece.target}", piece.start, piece.shape)


def _layer_placement(config: ModelConfig) -> Iterator[tuple[str, Piece]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm", Piece("input_norm", 0, (hidden,))
    yield "self_attn.q_proj", Piece("qkv", 0, (q_rows, hidden))
    yield "self_attn.k_proj", Piece("qkv", q_rows, (kv_rows, hidden))
    yield "self_attn.v_proj", Piece("qkv", q_rows + kv_rows, (kv_rows, hidden))
    yield "self_attn.o_proj", Piece("o", 0, (hidden, q_rows))
    yield "post_attention_layernorm", Piece("ffn_norm", 0, (hidden,))
    yield "mlp.gate_proj", Piece("gate_up", 0, (ffn, hidden))
    yield "mlp.up_proj", Piece("gate_up", ffn, (ffn, hidden))
    yield "mlp.down_proj", Piece("down", 0, (hidden, ffn))


def _target_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        rows = max(piece.start + piece.shape[0], shapes.get(piece.target, (0,))[0])
        shapes[piece.target] = (rows, *piece.shape[1:])
    return shapes


def _tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
