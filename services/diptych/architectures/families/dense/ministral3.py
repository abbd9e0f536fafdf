"""Ministral 3: Mistral whose queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, QueryGrowth
from diptych.architectures.hf_config import ORIGINAL, HfConfig, windows_everywhere
from diptych.common.errors import ConfigError


def read_query_growth(hf: HfConfig) -> QueryGrowth | None:
    """Read how queries grow, and take it from what is said of their rotation."""
    if not hf.rope_parameters:
        raise ConfigError(f"{hf.model_id}: config.json has no rope_parameters, of which this family has no one kind")
    beta = hf.pop_from_rope("llama_4_scaling_beta")
    hf.pop_from_rope("max_position_embeddings")  # said again
    return QueryGrowth(hf.rope_parameters[ORIGINAL], beta) if beta else None


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "layer_types": ()})
    growth = read_query_growth(hf)
    config, window = hf.shared("ministral3", theta=1_000_000.0), hf.get("sliding_window")
    return replace(config, query_growth=growth, windows=windows_everywhere(window, config))


MINISTRAL3 = placement.Family("Ministral3ForCausalLM", _read, placement.llama)
