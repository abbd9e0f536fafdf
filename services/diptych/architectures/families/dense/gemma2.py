"""Gemma 2: norms before and after each block, every other layer with a sliding window, soft caps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"use_bidirectional_attention": (False,)})
    config = gemma(hf, hf.shared("gemma2", tied=True))
    return replace(
        config,
        windows=hf.windows(hf.get("sliding_window", 4096), range(0, config.num_layers, 2)),
        attention_softcap=hf.get("attn_logit_softcapping", 50.0) or 0.0,
        logits_softcap=hf.get("final_logit_softcapping", 30.0) or 0.0,
    )


def gemma(hf: HfConfig, config: ModelConfig) -> ModelConfig:
    """Return what Gemma 2 and 3 have in common."""
    hf.refuse_unless({"attention_bias": (False,)})
    hf.refuse_unless({"hidden_activation": ("gelu_pytorch_tanh",)})
    hf.ignore("hidden_act")  # of published files; `hidden_activation` has replaced it
    return replace(
        config,
        activation="gelu_tanh",
        query_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )


NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def gemma_placement(config: ModelConfig) -> Iterator[placement.Placed]:
    """Yield the layout of Gemma 2 and 3."""
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        for name, target in NORMS.items():
            yield placement.whole(f"model.layers.{layer}.{name}.weight", f"{layer}.{target}", (config.hidden_size,))
        yield from placement.attention(config, layer)
        yield from placement.dense(config, layer)


GEMMA2 = placement.Family("Gemma2ForCausalLM", _read, gemma_placement)
