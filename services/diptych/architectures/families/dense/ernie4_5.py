"""Ernie 4.5, the dense ones: Llama in which neighbours rotate against each other."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "use_bias": (False,)})
    config = hf.shared("ernie4_5", theta=500_000.0, tied=True)
    return replace(config, rope=replace(config.rope, interleaved=True))


ERNIE4_5 = placement.Family("Ernie4_5ForCausalLM", _read, placement.llama)
