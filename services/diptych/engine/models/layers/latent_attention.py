"""What is before and after attention in a layer that keeps latents (DeepSeek V2, arXiv 2405.04434).

Keys and values of a head are products of a token's latent, which is all that is kept. They are never made: a query is
multiplied by its head's projection of keys instead, and what attention returns, a mean of latents, by that of values.
Of long prompts on GPUs they are made after all, a piece at a time, which takes fewer operations: `DecompressedBlock`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.architectures.config import Latent, ModelConfig
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.attention import in_halves
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.index_block import IndexBlock
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found
from diptych.engine.models.matrices.matrix import HeadMatrices, Matrix, TorchHeadMatrices
from diptych.engine.models.matrices.weights import Weights


class Queries(Protocol):
    """Makes the queries of all heads."""

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[num_tokens, hidden_size]` -> `[num_tokens, num_heads * query_dim]`, new, and what they are products of."""
        ...


@dataclass(frozen=True, slots=True)
class DirectQueries:
    """By one matrix."""

    matrix: Matrix
    size: int  # num_heads * query_dim

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        queries = x.new_empty(len(x), self.size)
        self.matrix.multiply(x, queries)
        return queries, x


@dataclass(frozen=True, slots=True)
class LowRankQueries:
    """By two matrices, and a norm between them."""

    ops: Ops
    down: Matrix
    norm: Tensor
    eps: float
    up: DirectQueries

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        narrow = x.new_empty(len(x), len(self.norm))
        self.down.multiply(x, narrow)
        self.ops.rms_norm(narrow, self.norm, self.eps, narrow)
        return self.up.of(narrow)


def _queries(config: ModelConfig, latent: Latent, weights: Weights, ops: Ops, layer: int) -> Queries:
    size = config.num_heads * latent.query_dim
    if not latent.query_rank:
        return DirectQueries(weights.matrix(f"{layer}.q"), size)
    up, norm = DirectQueries(weights.matrix(f"{layer}.q_b"), size), weights.norm(f"{layer}.q_a_norm")
    return LowRankQueries(ops, weights.matrix(f"{layer}.q_a"), norm, latent.norm_eps, up)


def turning(latent: Latent, states: Tensor) -> Tensor | int:
    """Return dimensions that rotate as attention has them; 0 where a layer has none."""
    if not latent.rope_dim:
        return 0
    return in_halves(states) if latent.interleaved else states


@dataclass(frozen=True, slots=True)
class Kept:
    """Makes what a layer keeps of each token."""

    ops: Ops
    latent: Latent
    kv: Matrix  # [rank + rope_dim, hidden_size]
    norm: Tensor  # [rank]

    @staticmethod
    def build(latent: Latent, weights: Weights, ops: Ops, layer: int) -> Kept:
        return Kept(ops, latent, weights.matrix(f"{layer}.kv_a"), weights.norm(f"{layer}.kv_a_norm"))

    def put(self, x: Tensor, out: Tensor) -> None:
        """`[num_tokens, hidden_size]` -> `[num_tokens, head_dim]`, of any stride: `[latent | to be rotated]`."""
        kept, rank = x.new_empty(len(x), self.latent.key_dim), self.latent.rank
        self.kv.multiply(x, kept)
        latents = kept[:, :rank].contiguous()
        self.ops.rms_norm(latents, self.norm, self.latent.norm_eps, latents)
        out[:, :rank] = latents
        out[:, rank:] = turning(self.latent, kept[:, rank:])


@dataclass(frozen=True, slots=True)
class LatentAttentionBlock:
    """`Projections` around attention to latents."""

    ops: Ops
    latent: Latent
    queries: Queries
    kept: Kept | None  # None: the layer attends to what another one keeps
    keys: HeadMatrices  # [num_heads, rank, nope_dim]
    values: HeadMatrices  # [num_heads, value_dim, rank]
    o: Matrix
    key_dim: int  # of queries and what is kept, in `Buffers.qkv`
    states_size: int  # of all of these; the indexer's numbers are behind them
    index: IndexBlock | None  # of a layer that chooses the tokens that it attends to

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> LatentAttentionBlock:
        latent = config.latent_of(layer)
        assert latent is not None
        num_rows = config.num_heads * (latent.nope_dim + latent.value_dim)
        heads = weights.matrix(f"{layer}.kv_b").rows(torch.arange(num_rows)).view(config.num_heads, -1, latent.rank)
        keys, values = heads[:, : latent.nope_dim], heads[:, latent.nope_dim :]
        return LatentAttentionBlock(
            ops=ops,
            latent=latent,
            queries=_queries(config, latent, weights, ops, layer),
            kept=Kept.build(latent, weights, ops, layer) if config.keeps(layer) else None,
            keys=ops.head_matrices(keys.transpose(1, 2).contiguous()),
            values=ops.head_matrices(values.contiguous()),
            o=weights.matrix(f"{layer}.o"),
            key_dim=config.head_dim,
            states_size=config.states_size,
            index=IndexBlock.build(config, weights, layer) if config.chooses(layer) else None,
        )

    def project_in(self, buffers: Buffers) -> None:
        """Queries become `[made for latents | to be rotated]`; what is kept, `[latent | to be rotated]`."""
        nope = self.project_turning(buffers)
        self.keys.multiply(nope, self.states(buffers)[:, :-1, : self.latent.rank])

    def states(self, buffers: Buffers) -> Tensor:
        """Return `[num_tokens, num_heads + 1, key_dim]`: of heads, then what is kept."""
        return buffers.qkv[:, : self.states_size].view(len(buffers.qkv), -1, self.key_dim)

    def project_turning(self, buffers: Buffers) -> Tensor:
        """Write all but what queries are beside what rotates; return that, `[num_tokens, num_heads, nope_dim]`."""
        x, states, nope_dim = buffers.normed, self.states(buffers), self.latent.nope_dim
        queries, narrow = self.queries.of(x)
        queries = queries.view(len(x), -1, self.latent.query_dim)
        if self.index is not None:
            self.index.project_in(x, narrow, buffers.qkv[:, self.states_size :])
        states[:, :-1, self.latent.rank :] = turning(self.latent, queries[..., nope_dim:])
        if self.kept is not None:
            self.kept.put(x, states[:, -1])
        return queries[..., :nope_dim]

    def project_out(self, buffers: Buffers) -> Found:
        attended = buffers.attended.view(len(buffers.attended), -1, self.latent.rank)
        values = attended.new_empty(*attended.shape[:2], self.latent.value_dim)
        self.values.multiply(attended, values)
        self.o.multiply(values.flatten(1), buffers.delta)
        return SUMMANDS

    def decompressed(self) -> DecompressedBlock | None:
        """Return the same layer with keys and values made; None where its matrices can't make them."""
        if (
            self.index is not None
            or self.latent.nope_dim > self.latent.rank
            or self.latent.value_dim > self.latent.rank
        ):
            return None
        if not (isinstance(self.keys, TorchHeadMatrices) and isinstance(self.values, TorchHeadMatrices)):
            return None
        return DecompressedBlock(self, self.keys, self.values)


@dataclass(frozen=True, slots=True)
class DecompressedBlock:
    """`Projections` around attention to keys and values that are made of latents; it is `LatentHeads`, too."""

    absorbed: LatentAttentionBlock
    keys: TorchHeadMatrices
    values: TorchHeadMatrices

    def project_in(self, buffers: Buffers) -> None:
        """Queries become `[as they were made | nothing, up to `rank` | to be rotated]`."""
        nope = self.absorbed.project_turning(buffers)
        self.absorbed.states(buffers)[:, :-1, : nope.shape[2]] = nope

    def project_out(self, buffers: Buffers) -> Found:
        self.absorbed.o.multiply(self.attended(buffers).flatten(1), buffers.delta)
        return SUMMANDS

    def attended(self, buffers: Buffers) -> Tensor:
        """Return what attention writes, `[num_tokens, num_heads, value_dim]`, in memory that was made for latents."""
        latent, found = self.absorbed.latent, buffers.attended
        num_heads = found.shape[1] // latent.rank
        return found.flatten()[: len(found) * num_heads * latent.value_dim].view(len(found), num_heads, -1)

    def keys_of(self, latents: Tensor, out: Tensor) -> None:
        self.keys.spread_back(latents, out)

    def values_of(self, latents: Tensor, out: Tensor) -> None:
        self.values.spread(latents, out)
