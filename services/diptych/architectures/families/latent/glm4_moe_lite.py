"""GLM 4.7 Flash: attention by latents and experts as in DeepSeek V3, but which layers have experts is listed."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.latent.deepseek_v3 import (
    latent_placement,
    layers_behind,
    next_name,
    num_next_layers,
    read_moe,
    with_latents,
)
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,)})
    hf.ignore("qk_head_dim")
    config = replace(hf.shared("glm4_moe_lite"), num_next_layers=num_next_layers(hf))
    moe = replace(read_moe(hf, config.num_layers), dense_layers=listed_dense_layers(hf, config.num_layers))
    return replace(with_latents(config, hf), moe=moe)


def listed_dense_layers(hf: HfConfig, num_layers: int) -> frozenset[int]:
    """Return the layers without experts. Without a list it is the first layer alone."""
    types = hf.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types of {num_layers} layers: {types}")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "dense")


GLM4_MOE_LITE = placement.Family(
    "Glm4MoeLiteForCausalLM", _read, latent_placement, not_read=layers_behind, next_name=next_name
)
