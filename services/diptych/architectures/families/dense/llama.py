"""Llama 2 and 3, and what is built alike."""

from __future__ import annotations

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "rope_interleaved": (False,)})
    hf.refuse_unless({"attention_bias": (False,), "mlp_bias": (False,)})
    return hf.shared("llama")


LLAMA = placement.Family("LlamaForCausalLM", _read, placement.llama)
