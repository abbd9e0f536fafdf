"""Refuses models of shapes that no layer can have, when their configuration has been read."""

from __future__ import annotations

from typing import Final

from diptych.architectures.config import Indexer, Latent, ModelConfig, Moe, QueryGrowth, Rope, WideHeads
from diptych.architectures.recurrent import Recurrent
from diptych.common.errors import ConfigError

MAX_EXPERTS: Final = 1 << 17  # of all layers together
MAX_GROWTHS: Final = 1 << 20  # of queries: how often they may grow


def check_shapes(config: ModelConfig) -> None:
    """Raise `ConfigError` for shapes that no attention can have."""
    sizes = (
        config.vocab_size,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    if min(*sizes, config.ffn_size, config.context_len) < 1:
        raise ConfigError(f"{config.model_id}: every size must be at least 1: {config}")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{config.model_id}: {config.num_heads} heads do not share {config.num_kv_heads} KV heads evenly"
        )
    if config.moe is not None and not 0 < config.moe.num_experts * config.num_layers <= MAX_EXPERTS:
        raise ConfigError(f"{config.model_id}: {config.moe.num_experts} experts a layer are none, or more than can be")
    if config.moe is not None:
        _check_choice(config, config.moe)
    if not isinstance(config.rms_norm_eps, float | int):
        raise ConfigError(f"{config.model_id}: rms_norm_eps must be a number, not {config.rms_norm_eps!r:.40}")
    if config.latent is not None:
        _check_latent(config, config.latent)
    if config.indexer is not None:
        _check_indexer(config, config.indexer)
    if config.sources:
        _check_sources(config, config.sources)
    if config.recurrent is not None:
        _check_recurrent(config, config.recurrent)
    if config.query_growth is not None:
        _check_growth(config, config.query_growth)
    if config.wide is not None:
        _check_kinds(config, config.wide)
    _check_rope(config, config.rope, config.head_dim if config.wide is None else config.wide.head_dim)
    if config.local_rope is not None:
        _check_rope(config, config.local_rope, config.head_dim)


def _check_kinds(config: ModelConfig, wide: WideHeads) -> None:
    if min(wide.head_dim, wide.num_kv_heads) < 1 or config.num_heads % wide.num_kv_heads:
        raise ConfigError(f"{config.model_id}: {config.num_heads} heads do not share {wide} evenly")
    if any(kind.num_borrowing >= kind.num_layers for kind in config.kinds):
        raise ConfigError(
            f"{config.model_id}: {config.num_borrowing} layers have no layer of their kind whose keys they could read"
        )


def _check_choice(config: ModelConfig, moe: Moe) -> None:
    groups, size = moe.num_groups, moe.num_experts // max(1, moe.num_groups)
    if groups < 1 or moe.num_experts % groups or not 1 <= moe.num_groups_kept <= groups:
        raise ConfigError(f"{config.model_id}: {moe.num_experts} experts do not make {groups} groups")
    if type(moe.scale) not in (int, float) or not moe.scale > 0:
        raise ConfigError(f"{config.model_id}: routed_scaling_factor must be above 0, not {moe.scale!r:.40}")
    if groups > 1 and size < 2:
        raise ConfigError(f"{config.model_id}: groups of {size} expert have no two best ones")
    if not 1 <= moe.experts_per_token <= moe.num_groups_kept * size:
        raise ConfigError(
            f"{config.model_id}: {moe.experts_per_token} experts a token are none, or more than there are"
        )


def _check_latent(config: ModelConfig, latent: Latent) -> None:
    if min(latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim) < 1:
        raise ConfigError(f"{config.model_id}: every size of latent attention must be at least 1: {latent}")


def _check_indexer(config: ModelConfig, indexer: Indexer) -> None:
    if min(indexer.num_heads, indexer.num_kept, indexer.head_dim) < 1:
        raise ConfigError(f"{config.model_id}: every size of an indexer must be at least 1: {indexer}")
    if config.latent is None or not (config.latent.query_rank or indexer.own_queries):
        raise ConfigError(f"{config.model_id}: an indexer's queries are made of latents, but q_lora_rank is 0")
    if indexer.head_dim < config.latent.rope_dim:
        raise ConfigError(f"{config.model_id}: index_head_dim {indexer.head_dim} is less than what of it rotates")
    if indexer.layers[:1] != (0,):
        raise ConfigError(f"{config.model_id}: the first layer must choose the tokens that it attends to")


def _check_sources(config: ModelConfig, sources: tuple[int, ...]) -> None:
    kept = [layer for layer, source in enumerate(sources) if source == layer]
    if len(sources) != config.num_layers or any(
        source not in kept or source > layer for layer, source in enumerate(sources)
    ):
        raise ConfigError(
            f"{config.model_id}: {sources} are not layers whose latents {config.num_layers} can attend to"
        )
    if config.latent is None or config.recurrent is not None:
        raise ConfigError(f"{config.model_id}: only layers with latents can attend to those of another")


def _check_recurrent(config: ModelConfig, recurrent: Recurrent) -> None:
    sizes = [size for part in recurrent.mixer.state_parts for size in part.shape]
    if min(*sizes, *recurrent.mixer.heads.values()) < 1:
        raise ConfigError(f"{config.model_id}: every size of a recurrent layer must be at least 1: {recurrent.mixer}")
    if config.wide is not None:
        raise ConfigError(f"{config.model_id}: recurrent layers beside attention of two kinds are not supported")
    if not config.attention_layers:
        raise ConfigError(f"{config.model_id}: models without any attention are not supported")


def _check_growth(config: ModelConfig, growth: QueryGrowth) -> None:
    if type(growth.factor) not in (int, float) or type(growth.period) is not int or growth.period < 1:
        raise ConfigError(f"{config.model_id}: queries cannot grow with their position as {growth} says")
    if config.context_len // growth.period > MAX_GROWTHS:
        raise ConfigError(f"{config.model_id}: queries would grow every {growth.period} tokens, which is too often")


def _check_rope(config: ModelConfig, rope: Rope, head_dim: int) -> None:
    fits = rope.dim % 2 == 0 and 0 < rope.dim <= head_dim - rope.start
    if not fits or len(rope.divisors) not in (0, rope.dim // 2):
        raise ConfigError(f"{config.model_id}: head_dim {head_dim} does not fit its rotary embedding")
