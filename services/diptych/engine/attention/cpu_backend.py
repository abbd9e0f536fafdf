"""Attention by the C kernel: rotation, KV write and attention in one call a layer. float32 on the CPU."""

from __future__ import annotations

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.layer_constants import Ropes, rope_tables
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.kernels.cpu.paged_attention import AttentionLayer, Heads, PagedAttention, Tokens


class CpuAttention:
    """`AttentionBackend` on `kv[num_pages, num_layers, num_planes, page_size, num_kv_heads, head_dim]`."""

    def __init__(
        self, config: ModelConfig, kv: Tensor, sinks: Tensor | None = None, ropes: Ropes | None = None
    ) -> None:
        """`sinks`: see `new_sinks`; `ropes`: see `rope_tables`."""
        latent_dim = config.value_dim if config.num_planes == 1 else None
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, latent_dim)
        self._kv = kv
        self._looks_ahead = config.sees_images_whole
        self._layers = attention_layers(config, kv, sinks, ropes)
        self._step: PagedAttention | None = None

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        host = batch.host
        seen_ends = host.seen_ends if self._looks_ahead and host.images else None
        tokens = Tokens(host.positions, host.out_slots, host.extend_lens, host.page_table, seen_ends)
        self._step = PagedAttention(self._heads, self._kv, tokens)

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        assert self._step is not None
        self._step.extend(qkv, self._layers[layer], out)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        assert self._step is not None
        self._step.decode(qkv, self._layers[layer], out)


def attention_layers(
    config: ModelConfig, kv: Tensor, sinks: Tensor | None = None, ropes: Ropes | None = None
) -> list[AttentionLayer]:
    """Return how each layer attends. `sinks`: see `new_sinks`; `ropes`: see `rope_tables`."""
    ropes = rope_tables(config, kv) if ropes is None else ropes
    return [
        AttentionLayer(
            config.place(index),
            ropes[config.rope_of(index)],
            rope_start=config.rope_of(index).start,
            scale=config.score_scale,
            window=config.window(index),
            chunked=config.chunked,
            softcap=config.attention_softcap,
            sinks=None if sinks is None else sinks[index],
            keeps=config.keeps(index),
        )
        for index in range(config.num_layers)
    ]
