"""Granite 3, the dense ones: Llama with factors for embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)})
    return replace(
        hf.shared("granite"),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        scales_given_rows=True,
        query_scale=float(hf.get("attention_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logits_divisor=float(hf.get("logits_scaling", 1.0)),
    )


GRANITE = placement.Family("GraniteForCausalLM", _read, placement.llama)
