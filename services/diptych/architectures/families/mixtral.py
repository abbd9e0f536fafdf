"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.family import Family
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config, window = hf.shared("mixtral", theta=1_000_000.0), hf.get("sliding_window")
    moe = Moe(hf.get("num_local_experts", 8), hf.get("num_experts_per_tok", 2), config.ffn_size, normalize=True)
    return replace(config, moe=moe, windows=(window,) * config.num_layers if window else ())


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        yield from placement.experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))


MIXTRAL = Family("MixtralForCausalLM", _read, _placement)
