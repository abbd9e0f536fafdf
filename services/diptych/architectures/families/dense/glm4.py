"""GLM-4-0414 and GLM-Z1: norms around each block, half of each head rotated, neighbours against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig

NORMS: Final = {
    "input_layernorm": "input_norm",
    "post_self_attn_layernorm": "attention_post_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "ffn_post_norm",
}


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config = hf.shared("glm4", partial_rotary_factor=0.5)
    rope = replace(config.rope, interleaved=True)
    return replace(config, qkv_bias=hf.get("attention_bias", True), post_norms=True, rope=rope)


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        for name, target in NORMS.items():
            yield placement.whole(f"model.layers.{layer}.{name}.weight", f"{layer}.{target}", (config.hidden_size,))
        yield from placement.attention(config, layer)
        yield from placement.fuse(f"model.layers.{layer}.mlp.gate_up_proj", "gate_up", placement.dense(config, layer))


GLM4 = placement.Family("Glm4ForCausalLM", _read, _placement)
