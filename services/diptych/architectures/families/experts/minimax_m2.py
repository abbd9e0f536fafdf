"""MiniMax M2: experts in every layer, chosen by sigmoids; all heads are normed as one vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig
from diptych.common.errors import ConfigError

BLOCK: Final = "block_sparse_moe"
FULL: Final = 1  # in `attn_type_list`


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "scoring_func": ("sigmoid",), "use_routing_bias": (True,)})
    hf.refuse_unless({"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)})
    if set(hf.get("attn_type_list") or (FULL,)) != {FULL}:
        raise ConfigError(f"{hf.model_id}: attn_type_list other than {FULL} (full attention) is not supported")
    hf.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    rotary = hf.get("rotary_dim")
    part = rotary / hf["head_dim"] if rotary else 1.0
    config = hf.shared("minimax_m2", theta=5_000_000.0, partial_rotary_factor=part)
    moe = Moe(
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffn_size=config.ffn_size,
        normalize=True,
        scoring="sigmoid",
        choice_bias=True,
    )
    return replace(config, qk_norm="all", moe=moe)


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    assert config.moe is not None
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        yield from placement.experts(config, layer, BLOCK, ("w1", "w3", "w2"))
        bias = placement.Piece(f"{layer}.choice_bias", 0, (config.moe.num_experts,), wide=True)
        yield f"model.layers.{layer}.{BLOCK}.e_score_correction_bias", (bias,)


MINIMAX_M2 = placement.Family("MiniMaxM2ForCausalLM", _read, _placement)
