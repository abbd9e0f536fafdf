"""Qwen 2 with a mixture of experts in most layers, and a gated network beside them that every token passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.families.dense.qwen2 import late_windows
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config = hf.shared("qwen2_moe")
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    moe = Moe(
        num_experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffn_size=hf["moe_intermediate_size"],
        normalize=hf.get("norm_topk_prob", False),
        dense_layers=frozenset(i for i in range(config.num_layers) if i in dense or (i + 1) % step),
        shared_ffn_size=hf["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    return replace(config, qkv_bias=hf.get("qkv_bias", True), windows=late_windows(hf), moe=moe)


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        if config.is_moe(layer):
            yield from placement.experts(config, layer, "mlp", placement.EXPERT_NAMES)
            yield from placement.shared_expert(config, layer, "mlp.shared_expert")
            gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
            yield placement.whole(gate, f"{layer}.shared_gate", (1, config.hidden_size))
        else:
            yield from placement.dense(config, layer)


QWEN2_MOE = placement.Family("Qwen2MoeForCausalLM", _read, _placement)
