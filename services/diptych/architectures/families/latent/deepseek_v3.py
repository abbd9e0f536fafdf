"""DeepSeek V3 and R1, Kimi K2: attention by latents; experts in groups, chosen with a bias, and one for every token.

The layer behind the last one, which predicts one token more, is read where it guesses: see `next_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import Latent, ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig, growth_of_all_dims

NORM_EPS: Final = 1e-6  # of latents, whatever that of the other norms


def read_moe(hf: HfConfig, num_layers: int) -> Moe:
    """Read experts as DeepSeek V3 and its successors have them."""
    hf.refuse_unless({"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
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
    if config.moe.choice_bias:
        bias = placement.Piece(f"{layer}.choice_bias", 0, (config.moe.num_experts,), wide=True)
        yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (bias,)
    if config.moe.shared_ffn_size:
        yield from placement.shared_expert(config, layer, "mlp.shared_experts")


def layers_behind(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the layers that predict more tokens than the next."""
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(max(1, config.num_next_layers)))


def next_name(config: ModelConfig, name: str) -> str | None:
    """Return what a tensor of the first of these layers is called in a model of that layer alone; None: of another."""
    prefix = f"model.layers.{config.num_layers}."
    own = name.removeprefix(prefix)
    if own == name or own.startswith(("embed_tokens.", "shared_head.head.")):  # which are those of the model
        return None
    return "model.norm.weight" if own == "shared_head.norm.weight" else f"model.layers.0.{own}"


def num_next_layers(hf: HfConfig) -> int:
    """Read how many layers behind the last one predict further tokens."""
    return hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0


def with_latents(config: ModelConfig, hf: HfConfig) -> ModelConfig:
    """Return `config` with attention as in DeepSeek V3."""
    latent = Latent(
        query_rank=hf.get("q_lora_rank") or 0,
        rank=hf["kv_lora_rank"],
        nope_dim=hf["qk_nope_head_dim"],
        rope_dim=hf["qk_rope_head_dim"],
        value_dim=hf["v_head_dim"],
        interleaved=hf.get("rope_interleave", True),
        norm_eps=NORM_EPS,
    )
    rope = hf.rope(hf.rope_parameters, latent.rope_dim, 10_000.0)
    return replace(
        config,
        num_kv_heads=1,
        head_dim=latent.key_dim,
        rope=replace(rope, start=latent.rank),
        query_scale=latent.query_dim**-0.5 * growth_of_all_dims(hf.rope_parameters) ** 2,
        latent=latent,
    )


def latent_placement(config: ModelConfig) -> Iterator[placement.Placed]:
    """Yield where the tensors of such a model go."""
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.latent_attention(config, layer)
        yield from moe_placement(config, layer)


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "moe_layer_freq": (1,)})
    hf.ignore("num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")
    config = replace(hf.shared("deepseek_v3"), num_next_layers=num_next_layers(hf))
    return replace(with_latents(config, hf), moe=read_moe(hf, config.num_layers))


DEEPSEEK_V3 = placement.Family(
    "DeepseekV3ForCausalLM", _read, latent_placement, not_read=layers_behind, next_name=next_name
)
