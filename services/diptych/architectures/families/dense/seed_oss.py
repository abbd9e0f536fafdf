"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "mlp_bias": (False,)})
    hf.ignore("residual_dropout")
    config = hf.shared("seed_oss")
    return replace(config, qkv_bias=hf.get("attention_bias", True), o_bias=hf.get("attention_out_bias", False))


SEED_OSS = placement.Family("SeedOssForCausalLM", _read, placement.llama)
