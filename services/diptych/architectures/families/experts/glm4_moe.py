"""GLM 4.5 and 4.6: experts as in DeepSeek V3, attention as in Qwen, half of each head rotated.

The layer behind the last one, which predicts one token more, is read where it guesses: see `next_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.latent.deepseek_v3 import (
    layers_behind,
    moe_placement,
    next_name,
    num_next_layers,
    read_moe,
)
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config = hf.shared("glm4_moe", partial_rotary_factor=0.5)
    return replace(
        config,
        qkv_bias=hf.get("attention_bias", False),
        qk_norm="heads" if hf.get("use_qk_norm") else None,
        moe=read_moe(hf, config.num_layers),
        num_next_layers=num_next_layers(hf),
    )


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        yield from moe_placement(config, layer)


GLM4_MOE = placement.Family("Glm4MoeForCausalLM", _read, _placement, not_read=layers_behind, next_name=next_name)
