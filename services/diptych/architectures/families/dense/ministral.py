"""Ministral: Mistral with a sliding window in some layers, all, or none."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config, window = hf.shared("ministral"), hf.get("sliding_window", 4096)
    return replace(config, windows=hf.windows(window, range(config.num_layers) if window else ()))


MINISTRAL = placement.Family("MinistralForCausalLM", _read, placement.llama)
