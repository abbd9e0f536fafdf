"""How large a KV pool, and a host tier, the options allow."""

from __future__ import annotations

from dataclasses import replace

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.runtime.scheduler_config import EngineOptions
from diptych.kvtransfer.layout import HeadShare, PoolLayout


def pool_layout(model: ModelConfig, options: EngineOptions, share: HeadShare | None = None) -> PoolLayout:
    """Return the largest pool that fits `kv_cache_mib`; `model` is what this process computes, `share` whose heads."""
    heads, dim = model.num_kv_heads, model.head_dim
    one = PoolLayout(1, model.num_layers, options.page_size, heads, dim, options.kv_dtype, share)
    num_pages = options.kv_cache_mib * 2**20 // one.page_nbytes
    if num_pages < 2:
        raise ConfigError(f"--kv-cache-mib {options.kv_cache_mib} holds no page of {one.page_nbytes} bytes: raise it")
    layout = replace(one, num_pages=num_pages)
    layout.validate()
    return layout


def head_share(model: ModelConfig, options: EngineOptions, rank: int) -> HeadShare | None:
    """Return which heads of the whole `model` a rank holds; None for one that is alone."""
    return HeadShare(rank, options.tp, model.num_kv_heads) if options.tp > 1 else None


def num_host_slots(layout: PoolLayout, options: EngineOptions) -> int:
    """Return how many pages fit `host_cache_mib`; 0 when it is off."""
    num_slots = options.host_cache_mib * 2**20 // layout.page_nbytes
    if options.host_cache_mib and not num_slots:
        raise ConfigError(
            f"--host-cache-mib {options.host_cache_mib} holds no page of {layout.page_nbytes} bytes: raise it"
        )
    return num_slots
