"""Phi 3 and 4-mini: Llama in other words. Checkpoints keep q, k, v and gate, up as fused as we do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig, windows_everywhere


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)})
    config, window = hf.shared("phi3"), hf.get("sliding_window")
    return replace(config, windows=windows_everywhere(window, config))


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.fuse(f"model.layers.{layer}.self_attn.qkv_proj", "qkv", placement.attention(config, layer))
        yield from placement.fuse(f"model.layers.{layer}.mlp.gate_up_proj", "gate_up", placement.dense(config, layer))


PHI3 = placement.Family("Phi3ForCausalLM", _read, _placement)
