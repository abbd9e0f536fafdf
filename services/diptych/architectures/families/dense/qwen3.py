"""Qwen 3: Llama with normed queries and keys; later layers may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.qwen2 import late_windows
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,)})
    return replace(hf.shared("qwen3"), qk_norm="heads", windows=late_windows(hf))


QWEN3 = placement.Family("Qwen3ForCausalLM", _read, placement.llama)
