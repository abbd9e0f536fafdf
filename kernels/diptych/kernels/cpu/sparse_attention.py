"""Sparse attention of one step over paged latents: an indexer chooses, attention walks that; see the headers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load
from diptych.kernels.cpu.paged_attention import AttentionLayer, Heads, PagedAttention, Tokens


@dataclass(frozen=True, slots=True)
class IndexHeads:
    """What chooses: all its heads score a key, and the best are kept."""

    num_heads: int
    head_dim: int
    num_kept: int

    @property
    def size(self) -> int:
        """The numbers of a token: queries, a key, weights."""
        return (self.num_heads + 1) * self.head_dim + self.num_heads

    @property
    def as_heads(self) -> Heads:
        """Index keys are the keys of an attention whose heads are those of the indexer."""
        return Heads(self.num_heads, 1, self.head_dim, self.head_dim)


class SparseAttention:
    """One step over all layers of `kv`, of one plane and head, and of `index_keys`; both as in `PagedAttention`.

    `qkv` of all calls is `[num_tokens, num_states * head_dim + index.size]`: states, and behind them a token's index
    queries, its index key and the weights of index heads. A token that sees no more than `num_kept` attends to all, and
    a step without others is computed as without an indexer.
    """

    def __init__(self, heads: Heads, index: IndexHeads, kv: Tensor, index_keys: Tensor, tokens: Tokens) -> None:
        assert heads.num_kv_heads == heads.num_planes == 1, heads
        self._library = load()
        self._index, self._states_size = index, heads.num_states * heads.head_dim
        row_size = self._states_size + index.size
        self._attention = PagedAttention(heads, kv, tokens, row_size)
        self._choice = PagedAttention(index.as_heads, index_keys, tokens, row_size)
        num_tokens = len(tokens.positions)
        is_sparse = num_tokens > 0 and int(tokens.positions.max()) >= index.num_kept
        shape = (num_tokens, index.num_kept if is_sparse else 0)
        # what `choose` writes: positions, ascending; rows of tokens that attend to all mean nothing
        self.chosen = torch.empty(shape, dtype=torch.int32)

    def choose(self, qkv: Tensor, layer: AttentionLayer) -> None:
        """Store index keys in the layer of `index_keys`, and choose by them. Index queries are rotated in place.

        `layer`: its place among those that choose, and how its keys rotate; its scale means nothing.
        """
        index = address(qkv) + self._states_size * qkv.itemsize
        arguments = self._choice.pointer, layer.pointer, index, self._index.num_kept, self.chosen.data_ptr()
        if self._library.diptych_choose(*arguments):
            raise MemoryError("the scores of index keys")

    def decode(self, qkv: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """Attend to what was chosen last, as `PagedAttention.decode` does: each token as it would be alone."""
        if self.chosen.numel():
            self._attend(qkv, layer, out)
        else:
            self._attention.decode(qkv, layer, out)

    def extend(self, qkv: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """Do the same for any number of tokens a request."""
        if self.chosen.numel():
            self._attend(qkv, layer, out)
        else:
            self._attention.extend(qkv, layer, out)

    def _attend(self, qkv: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        self._attention.check_shapes(qkv, layer, out)
        states, results = address(qkv), address(out)
        choice = self._index.num_kept, self.chosen.data_ptr()
        self._library.diptych_sparse_attention(self._attention.pointer, layer.pointer, states, results, *choice)
