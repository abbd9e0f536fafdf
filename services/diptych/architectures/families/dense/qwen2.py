"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; later layers may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "use_mrope": (False,)})
    return replace(hf.shared("qwen2"), qkv_bias=True, windows=late_windows(hf))


def late_windows(hf: HfConfig) -> tuple[int, ...]:
    """Read the windows of a Qwen model: from `max_window_layers` on, if at all."""
    first, window = hf.get("max_window_layers", 28), hf.get("sliding_window", 4096)
    if not hf.get("use_sliding_window"):
        first, window = hf["num_hidden_layers"], None
    return hf.windows(window, range(first, hf["num_hidden_layers"]))


QWEN2 = placement.Family("Qwen2ForCausalLM", _read, placement.llama)
