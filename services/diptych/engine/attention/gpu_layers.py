"""What every backend of GPUs does first in a layer: rotate queries and keys, store keys and values, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.layer_constants import Ropes, kv_scales, rope_tables
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.kernels.gpu.attention.rope_store import rope_store


@dataclass(frozen=True, slots=True, eq=False)
class GpuLayer:
    """One layer's part of the pool, and its constants."""

    config: ModelConfig
    kv: Tensor  # [num_pages, num_planes, page_size, num_kv_heads, head_dim], a view
    rope: Tensor  # [num_positions, 2, rope_dim / 2]
    rope_start: int
    window: int  # tokens that it sees; 0: all
    k_scale: float = 1.0  # of FP8: a key is what is stored times this
    v_scale: float = 1.0
    num_kept: int = 0  # KV heads whose keys and values a token brings; 0: an earlier layer has stored them
    sinks: Tensor | None = None  # [num_heads], see `new_sinks`

    def rotate_and_store(self, qkv: Tensor, batch: StagedBatch) -> Tensor:
        """Return the rotated queries, `[num_tokens, num_heads, head_dim]`: a view of `qkv`."""
        config = self.config
        rope_store(
            qkv,
            batch.positions,
            batch.out_slots,
            self.rope,
            self.kv[..., : self.num_kept, :],
            num_heads=config.num_heads,
            num_kv_heads=self.num_kept,
            head_dim=config.head_dim,
            rope_start=self.rope_start,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        return qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads]


def gpu_layers(
    config: ModelConfig, kv: Tensor, sinks: Tensor | None = None, ropes: Ropes | None = None
) -> list[GpuLayer]:
    """Return the layers of `kv[num_pages, num_layers, num_planes, page_size, num_kv_heads, head_dim]`.

    `sinks`: see `new_sinks`; `ropes`: see `rope_tables`.
    """
    ropes = rope_tables(config, kv) if ropes is None else ropes
    layers = zip(map(config.rope_of, range(config.num_layers)), kv_scales(config, kv.dtype), strict=True)
    return [
        GpuLayer(
            config,
            kv[:, config.place(index)],
            ropes[rope],
            rope.start,
            config.window(index),
            *scales,
            num_kept=config.num_kv_heads if config.keeps(index) else 0,
            sinks=None if sinks is None else sinks[index],
        )
        for index, (rope, scales) in enumerate(layers)
    ]
