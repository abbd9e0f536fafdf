"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig, windows_everywhere


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config, window = hf.shared("mixtral", theta=1_000_000.0), hf.get("sliding_window")
    moe = Moe(hf.get("num_local_experts", 8), hf.get("num_experts_per_tok", 2), config.ffn_size, normalize=True)
    return replace(config, moe=moe, windows=windows_everywhere(window, config))


_PLACEMENT = partial(placement.llama, block="block_sparse_moe", names=("w1", "w3", "w2"))
MIXTRAL = placement.Family("MixtralForCausalLM", _read, _PLACEMENT)
