"""OLMo 2: norms behind attention and feed-forward network, none before; all heads are normed as one vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig

NORMS: Final = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def read_olmo(hf: HfConfig, architecture: str, theta: float) -> ModelConfig:
    """Return what OLMo 2 and 3 have in common."""
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "clip_qkv": ()})
    config = hf.shared(architecture, theta=theta)
    return replace(config, qk_norm="all", pre_norms=False, post_norms=True)


def _read(hf: HfConfig) -> ModelConfig:
    return read_olmo(hf, "olmo2", 10_000.0)


def olmo_placement(config: ModelConfig) -> Iterator[placement.Placed]:
    """Yield the layout of OLMo 2 and 3."""
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        for name, target in NORMS.items():
            yield placement.whole(f"model.layers.{layer}.{name}.weight", f"{layer}.{target}", (config.hidden_size,))
        yield from placement.attention(config, layer)
        yield from placement.dense(config, layer)


OLMO2 = placement.Family("Olmo2ForCausalLM", _read, olmo_placement)
