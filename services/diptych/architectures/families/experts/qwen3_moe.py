"""Qwen 3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)})
    hf.ignore("sliding_window", "max_window_layers")
    config = hf.shared("qwen3_moe")
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    moe = Moe(
        num_experts=hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffn_size=hf["moe_intermediate_size"],
        normalize=hf.get("norm_topk_prob", False),
        dense_layers=frozenset(i for i in range(config.num_layers) if i in dense or (i + 1) % step),
    )
    return replace(config, qk_norm="heads", moe=moe)


QWEN3_MOE = placement.Family("Qwen3MoeForCausalLM", _read, placement.llama)
