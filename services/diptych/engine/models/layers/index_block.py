"""What a layer gives an indexer: queries, a key and weights of each token, in sparse attention (DeepSeek V3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.config import Indexer, ModelConfig
from diptych.engine.models.layers.attention import in_halves
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights

NORM_EPS: Final = 1e-6  # of keys, and of what queries are made of, in every model


@dataclass(frozen=True, slots=True)
class IndexBlock:
    """All ranks compute all of it."""

    indexer: Indexer
    rope_dim: int
    query_norm: tuple[Tensor, Tensor | None] | None  # of what queries are made of, weights and biases
    queries: Matrix  # [num_heads * head_dim, query_rank or hidden_size]
    keys: Matrix  # [head_dim, hidden_size]
    key_norm: tuple[Tensor, Tensor | None]  # weights and biases, [head_dim]
    weights: Matrix  # [num_heads, hidden_size]

    @staticmethod
    def build(config: ModelConfig, weights: Weights, layer: int) -> IndexBlock:
        assert config.indexer is not None
        assert config.latent is not None
        return IndexBlock(
            indexer=config.indexer,
            rope_dim=config.latent.rope_dim,
            query_norm=_query_norm(config.indexer, weights, layer),
            queries=weights.matrix(f"{layer}.index_q"),
            keys=weights.matrix(f"{layer}.index_k"),
            key_norm=(weights.norm(f"{layer}.index_k_norm"), weights.vector(f"{layer}.index_k_norm_bias")),
            weights=weights.matrix(f"{layer}.index_weights"),
        )

    def project_in(self, x: Tensor, narrow: Tensor, out: Tensor) -> None:
        """`out`, `[num_tokens, Indexer.size]`, becomes queries, the key, and weights.

        `x` is `[num_tokens, hidden_size]`, `narrow` what attention's queries are made of, which may be `x` again.
        """
        num_heads, dim = self.indexer.num_heads, self.indexer.head_dim
        queries, keys = x.new_empty(len(x), num_heads * dim), x.new_empty(len(x), dim)
        weights = x.new_empty(len(x), num_heads)
        if self.query_norm is not None:
            narrow = F.layer_norm(x, (x.shape[1],), *self.query_norm, eps=NORM_EPS)
        self.queries.multiply(narrow, queries)
        self.keys.multiply(x, keys)
        self.weights.multiply(x, weights)
        keys = F.layer_norm(keys, (dim,), *self.key_norm, eps=NORM_EPS)
        heads = out[:, : (num_heads + 1) * dim].view(len(x), -1, dim)
        heads[:, :-1], heads[:, -1] = queries.view(len(x), -1, dim), keys
        if self.indexer.interleaved:
            heads[..., : self.rope_dim] = in_halves(heads[..., : self.rope_dim])
        out[:, (num_heads + 1) * dim :] = weights


def _query_norm(indexer: Indexer, weights: Weights, layer: int) -> tuple[Tensor, Tensor | None] | None:
    if not indexer.own_queries:
        return None
    return weights.norm(f"{layer}.index_q_norm"), weights.vector(f"{layer}.index_q_norm_bias")
