"""Mistral: Llama with a sliding window in every layer, or none."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig, windows_everywhere


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "layer_types": ()})
    config, window = hf.shared("mistral"), hf.get("sliding_window", 4096)
    return replace(config, windows=windows_everywhere(window, config))


MISTRAL = placement.Family("MistralForCausalLM", _read, placement.llama)
