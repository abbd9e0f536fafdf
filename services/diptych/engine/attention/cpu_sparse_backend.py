"""Sparse attention to latents by the C kernels: an indexer chooses the tokens that a query attends to.

In float32, on the CPU. `sparse_attention.py` has the same in plain torch.
"""

from __future__ import annotations

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.cpu_backend import attention_layers
from diptych.engine.attention.layer_constants import rope_tables
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.kernels.cpu.paged_attention import AttentionLayer, Heads, Tokens
from diptych.kernels.cpu.sparse_attention import IndexHeads, SparseAttention


class CpuSparseAttention:
    """`AttentionBackend` on two views of a pool, see `region_views`: of latents, and of index keys."""

    def __init__(self, config: ModelConfig, kv: Tensor, index_keys: Tensor) -> None:
        indexer = config.indexer
        assert indexer is not None
        self._heads = Heads(config.num_heads, 1, config.head_dim, config.value_dim)
        self._index_heads = IndexHeads(indexer.num_heads, indexer.head_dim, indexer.num_kept)
        self._kv, self._index_keys = kv, index_keys
        self._layers = attention_layers(config, kv)
        ropes = rope_tables(config, kv)
        self._choosing = {
            layer: AttentionLayer(place, ropes[config.rope_of(layer)], scale=1.0)
            for place, layer in enumerate(indexer.layers)
        }
        self._step: SparseAttention | None = None

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        host = batch.host
        tokens = Tokens(host.positions, host.out_slots, host.extend_lens, host.page_table)
        self._step = SparseAttention(self._heads, self._index_heads, self._kv, self._index_keys, tokens)

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        self._chosen(qkv, layer).extend(qkv, self._layers[layer], out)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        self._chosen(qkv, layer).decode(qkv, self._layers[layer], out)

    def _chosen(self, qkv: Tensor, layer: int) -> SparseAttention:
        """Return the step, in which the tokens are chosen that the layer attends to."""
        assert self._step is not None, "no step was prepared"
        if layer in self._choosing:
            self._step.choose(qkv, self._choosing[layer])
        return self._step
