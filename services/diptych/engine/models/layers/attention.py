"""What is before and after attention in a layer: project, norm the heads; project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import Found, summands_and
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


class Projections(Protocol):
    """`project_in`, then attention, then `project_out`: in the last layer of the tokens alone that are asked about."""

    def project_in(self, buffers: Buffers) -> None:
        """`normed` -> `qkv`, and `gates` where attention has them; of a recurrent layer: `projected`."""
        ...

    def project_out(self, buffers: Buffers) -> Found:
        """`attended`, which may be overwritten, and `gates` -> `delta`; of a recurrent layer: `mixed` -> `delta`."""
        ...


class StateMixer(Projections, Protocol):
    """`Projections` of a layer that keeps a state in place of keys and values, and what is between them."""

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        """Mix each token of a step with the state of its request, and bring that up to date, in place.

        `projected`: `[num_tokens, mixer.in_size]`, may be overwritten; `out`: `[num_tokens, mixer.out_size]`. `state`
        has a tensor for each of `mixer.state_parts`, `[num_slots, *shape]`; the requests' slots are
        `batch.state_slots`, and what a request begins with is there already; -1 is nobody's, of which nothing is kept.
        A request's tokens, `batch.host.extend_lens` of them, are in the order of its text. What is
        computed for a request depends on its own tokens alone, to the bit.
        """
        ...


class QkNorms(Protocol):
    """Norms of queries and keys."""

    def apply(self, qkv: Tensor) -> None:
        """Norm the queries and keys of `qkv`, as in `AttentionBackend`, in place."""
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Each head by itself."""

    ops: Ops
    num_heads: int
    queries: Tensor  # [head_dim]
    keys: Tensor
    eps: float

    def apply(self, qkv: Tensor) -> None:
        self.ops.norm_heads(qkv, self.num_heads, self.queries, self.keys, self.eps)


@dataclass(frozen=True, slots=True)
class ValueNorms:
    """Queries and keys as in `HeadNorms`, and values without weights: Gemma 4's."""

    heads: HeadNorms
    start: int  # of values in a row
    ones: Tensor  # [head_dim]

    def apply(self, qkv: Tensor) -> None:
        self.heads.apply(qkv)
        values = qkv[:, self.start :]
        normed = values.clone(memory_format=torch.contiguous_format).view(-1, len(self.ones))
        self.heads.ops.rms_norm(normed, self.ones, self.heads.eps, normed)
        values.copy_(normed.view(values.shape))


@dataclass(frozen=True, slots=True)
class QueryNorms:
    """Those of a layer that has queries alone."""

    ops: Ops
    queries: Tensor  # [head_dim]
    eps: float

    def apply(self, qkv: Tensor) -> None:
        heads = qkv.view(-1, len(self.queries))
        self.ops.rms_norm(heads, self.queries, self.eps, heads)


@dataclass(frozen=True, slots=True)
class WholeNorms:
    """All heads as one vector: OLMo 2's."""

    ops: Ops
    queries: Tensor  # [num_heads * head_dim]
    keys: Tensor  # [num_kv_heads * head_dim]
    eps: float

    def apply(self, qkv: Tensor) -> None:
        ends = len(self.queries), len(self.queries) + len(self.keys)
        for states, weight in ((qkv[:, : ends[0]], self.queries), (qkv[:, ends[0] : ends[1]], self.keys)):
            normed = states.clone(memory_format=torch.contiguous_format)
            self.ops.rms_norm(normed, weight, self.eps, normed)
            states.copy_(normed)


@dataclass(frozen=True, slots=True)
class SharedNorms:
    """The same with heads that other ranks have."""

    ops: Ops
    queries: Tensor  # [num_heads * head_dim], of this rank
    keys: Tensor  # [num_kv_heads * head_dim]
    eps: float

    def apply(self, qkv: Tensor) -> None:
        ends = len(self.queries), len(self.queries) + len(self.keys)
        queries, keys = qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]
        squares = torch.stack([states.float().pow(2).mean(dim=-1) for states in (queries, keys)])  # [2, num_tokens]
        self.ops.ranks.all_reduce(squares)
        scales = squares.div_(self.ops.ranks.size).add_(self.eps).rsqrt_()[..., None]
        for states, weight, scale in zip((queries, keys), (self.queries, self.keys), scales, strict=True):
            states.copy_(weight * (states.float() * scale).to(weight.dtype))


def _norms(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> QkNorms | None:
    if config.qk_norm is None:
        return None
    if config.qk_norm == "unweighted":
        return _unweighted_norms(config, weights, ops, layer)
    if not config.keeps(layer):
        return QueryNorms(ops, weights.norm(f"{layer}.q_norm"), config.rms_norm_eps)
    queries, keys = weights.norm(f"{layer}.q_norm"), weights.norm(f"{layer}.k_norm")
    if config.qk_norm == "heads":
        heads = HeadNorms(ops, config.num_heads, queries, keys, config.rms_norm_eps)
        start = (config.num_heads + config.kv_heads_of(layer)) * len(keys)
        return ValueNorms(heads, start, torch.ones_like(keys)) if config.value_norm else heads
    return (WholeNorms if ops.ranks.size == 1 else SharedNorms)(ops, queries, keys, config.rms_norm_eps)


def _unweighted_norms(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> QkNorms | None:
    """Return norms of the layers that rotate: before it, as rotation leaves a vector's length as it is."""
    if config.rope_of(layer).is_still:
        return None
    ones = weights.norm(f"{layer}.input_norm").new_ones(config.head_dim)
    return HeadNorms(ops, config.num_heads, ones, ones, config.rms_norm_eps)


def in_halves(states: Tensor) -> Tensor:
    """Return `[..., dim]` with the first of all neighbours, then the second ones: as attention rotates them."""
    return states.reshape(*states.shape[:-1], -1, 2).mT.flatten(-2)


@dataclass(frozen=True, slots=True)
class Halves:
    """Lays out queries and keys whose neighbours rotate against each other as attention rotates them."""

    num_heads: int  # of queries and keys
    head_dim: int
    dim: int  # so many of a head, the first, rotate

    def apply(self, qkv: Tensor) -> None:
        turning = qkv.view(len(qkv), -1, self.head_dim)[:, : self.num_heads, : self.dim]
        turning.copy_(in_halves(turning))


@dataclass(frozen=True, slots=True)
class KeysAgain:
    """`Matrix` of queries and keys, whose products of keys come again as values."""

    matrix: Matrix
    start: int  # of keys in a row,
    end: int

    def multiply(self, x: Tensor, out: Tensor) -> None:
        product = out.new_empty(len(x), self.end)
        self.matrix.multiply(x, product)
        out[:, : self.end].copy_(product)
        out[:, self.end :].copy_(product[:, self.start :])

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(torch.where(ids < self.end, ids, ids - (self.end - self.start)))


def _projection(config: ModelConfig, weights: Weights, layer: int) -> Matrix:
    """Return the matrix of queries, and of keys and values where the layer has them."""
    matrix, wide = weights.matrix(f"{layer}.qkv"), config.wide_at(layer)
    if wide is None or not wide.keys_are_values or not config.keeps(layer):
        return matrix
    num_queries = config.num_heads * wide.head_dim
    return KeysAgain(matrix, num_queries, num_queries + wide.num_kv_heads * wide.head_dim)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """`Projections` of queries, keys and values as they are."""

    ops: Ops
    qkv: Matrix
    qkv_bias: Tensor | None
    gate: Matrix | None  # of what heads return, see `ModelConfig.attention_gate`
    o: Matrix
    o_bias: Tensor | None
    norm_in: QkNorms | None
    halves: Halves | None

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> AttentionBlock:
        rope = config.rope_of(layer)
        halves = Halves(config.num_heads + config.num_kv_heads, config.head_dim, rope.dim)
        return AttentionBlock(
            ops=ops,
            qkv=_projection(config, weights, layer),
            qkv_bias=weights.vector(f"{layer}.qkv_bias"),
            gate=weights.matrix(f"{layer}.gate") if config.attention_gate else None,
            o=weights.matrix(f"{layer}.o"),
            o_bias=weights.vector(f"{layer}.o_bias"),
            norm_in=_norms(config, weights, ops, layer),
            halves=halves if rope.interleaved else None,
        )

    def project_in(self, buffers: Buffers) -> None:
        self.qkv.multiply(buffers.normed, buffers.qkv)
        if self.qkv_bias is not None:
            buffers.qkv.add_(self.qkv_bias)
        if self.gate is not None:
            self.gate.multiply(buffers.normed, buffers.gates)
        if self.norm_in is not None:
            self.norm_in.apply(buffers.qkv)
        if self.halves is not None:
            self.halves.apply(buffers.qkv)

    def project_out(self, buffers: Buffers) -> Found:
        if self.gate is not None:
            self.ops.mul_sigmoid(buffers.attended, buffers.gates)
        self.o.multiply(buffers.attended, buffers.delta)
        return summands_and(self.o_bias)
