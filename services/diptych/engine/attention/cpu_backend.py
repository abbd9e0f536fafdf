"""Attention by the C kernel: rotation, KV write and attention in one call a layer. float32 on the CPU."""

from __future__ import annotations

from torch import Tensor

from diptych.engine.attention.rope import rope_table
from diptych.engine.batch import ForwardBatch, ForwardMode
from diptych.engine.loader.config import ModelConfig
from diptych.kernels.cpu.paged_attention import Heads, PagedAttention, Tokens


class CpuAttention:
    """`AttentionBackend` on `kv[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`."""

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._kv = kv
        self._rope = rope_table(config.rope, config.context_len)
        self._mode = ForwardMode.EXTEND
        self._step: PagedAttention | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        tokens = Tokens(batch.positions, batch.out_slots, batch.extend_lens, batch.page_table)
        self._mode = batch.mode
        self._step = PagedAttention(self._heads, self._kv, self._rope, tokens)

    def attend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        assert self._step is not None
        if self._mode is ForwardMode.DECODE:
            self._step.decode(qkv, layer, out)
        else:
            self._step.extend(qkv, layer, out)
