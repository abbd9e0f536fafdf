"""Llama 2 and 3, and what is built alike."""

from __future__ import annotations

from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.hf_config import HfConfig
from diptych.engine.models import placement
from diptych.engine.models.family import Family


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "rope_interleaved": (False,)})
    hf.refuse_unless({"attention_bias": (False,), "mlp_bias": (False,)})
    return hf.shared("llama")


LLAMA = Family("LlamaForCausalLM", _read, placement.llama)
