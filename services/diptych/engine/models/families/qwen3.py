"""Qwen 3: Llama with normed queries and keys; later layers may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.hf_config import HfConfig
from diptych.engine.models import placement
from diptych.engine.models.families.qwen2 import late_windows
from diptych.engine.models.family import Family


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,)})
    return replace(hf.shared("qwen3"), qk_norm=True, windows=late_windows(hf))


QWEN3 = Family("Qwen3ForCausalLM", _read, placement.llama)
