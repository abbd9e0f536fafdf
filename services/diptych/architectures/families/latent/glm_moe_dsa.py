"""GLM 5: DeepSeek V3.2, but some layers attend to the tokens that a layer before them has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.latent.deepseek_v3 import layers_behind
from diptych.architectures.families.latent.deepseek_v32 import read_indexer, read_sparse, sparse_placement
from diptych.architectures.hf_config import HfConfig

KINDS: Final = {"F": "full", "S": "shared"}  # of a layer's indexer, as patterns write them


def _read(hf: HfConfig) -> ModelConfig:
    config = read_sparse(hf, "glm_moe_dsa")
    return replace(config, indexer=read_indexer(hf, indexing_layers(hf, config.num_layers), interleaved=True))


def indexing_layers(hf: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers that choose tokens."""
    types = _types(hf, num_layers)
    if len(types) != num_layers or not {*types} <= {*KINDS.values()}:
        raise ValueError(f"indexer_types of {num_layers} layers: {types}")
    return tuple(layer for layer, kind in enumerate(types) if kind == "full")


def _types(hf: HfConfig, num_layers: int) -> Sequence[str]:
    """Without a list or a pattern, from a layer on it is every so many; that is every layer if nothing is said."""
    listed, pattern = hf.get("indexer_types"), hf.get("index_topk_pattern")
    every, first = max(hf.get("index_topk_freq") or 1, 1), hf.get("index_skip_topk_offset", 2)
    if listed is not None:
        return list(listed)
    if pattern is not None:
        return [KINDS[kind] for kind in pattern] if isinstance(pattern, str) else list(pattern)
    return ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(num_layers)]


GLM_MOE_DSA = placement.Family("GlmMoeDsaForCausalLM", _read, sparse_placement, not_read=layers_behind)
