"""GLM 4.5 and 4.6: experts as in DeepSeek V3, attention as in Qwen, half of each head rotated.

The layers behind the last one, which predict several tokens at once, are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig


def read_moe(hf: HfConfig, num_layers: int) -> Moe:
    """Read experts as DeepSeek V3 and its successors have them."""
    ffn_size, dense = hf["moe_intermediate_size"], hf.get("first_k_dense_replace") or 0
    return Moe(
        num_experts=hf["n_routed_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffn_size=ffn_size,
        normalize=hf.get("norm_topk_prob", True),
        dense_layers=frozenset(range(min(dense, num_layers))),
        scoring="sigmoid",
        choice_bias=True,
        num_groups=hf.get("n_group") or 1,
        num_groups_kept=hf.get("topk_group") or 1,
        scale=hf.get("routed_scaling_factor") or 1.0,
        shared_ffn_size=ffn_size * (hf.get("n_shared_experts") or 0),
    )


def moe_placement(config: ModelConfig, layer: int) -> Iterator[placement.Placed]:
    """Yield what follows a layer's attention, named as in DeepSeek V3."""
    if not config.is_moe(layer):
        yield from placement.dense(config, layer)
        return
    assert config.moe is not None
    yield from placement.experts(config, layer, "mlp", placement.EXPERT_NAMES)
    bias = placement.Piece(f"{layer}.choice_bias", 0, (config.moe.num_experts,), wide=True)
    yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (bias,)
    if config.moe.shared_ffn_size:
        yield from placement.shared_expert(config, layer, "mlp.shared_experts")


def layers_behind(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the layers that predict more tokens than the next."""
    return (f"model.layers.{config.num_layers}.",)


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    hf.ignore("num_nextn_predict_layers")
    config = hf.shared("glm4_moe", partial_rotary_factor=0.5)
    return replace(
        config,
        qkv_bias=hf.get("attention_bias", False),
        qk_norm="heads" if hf.get("use_qk_norm") else None,
        moe=read_moe(hf, config.num_layers),
    )


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        yield from moe_placement(config, layer)


GLM4_MOE = placement.Family("Glm4MoeForCausalLM", _read, _placement, not_read=layers_behind)
