"""Model configurations from Hugging Face's JSON: what is read, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_config import tiny_config

from diptych.architectures.config import (
    ClampedSwiglu,
    Indexer,
    Latent,
    ModelConfig,
    Moe,
    QueryGrowth,
    Rope,
    WideHeads,
)
from diptych.architectures.recurrent import DeltaNet, KimiDelta, Mamba2, Recurrent, ShortConv
from diptych.architectures.registry import FAMILIES, from_hf
from diptych.architectures.shape_check import check_shapes
from diptych.checkpoints.quantization.weight import as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


ENCODERS = {"bert", "modernbert", "roberta", "xlm_roberta"}  # see `test_pooling`
WITH_TOWERS = {"qwen2_5_vl", "qwen3_vl"}  # see `test_vision`
WITH_IMAGES = {"gemma3", "gemma4", "kimi_k25", "llama4", "mistral3", "mistral_large4", "qwen3_5", "qwen3_5_moe"}


def test_a_plain_llama_config_is_read_with_the_defaults_of_its_format() -> None:
    assert from_hf(LLAMA, {}, "tiny") == tiny_config(
        vocab_size=100,
        hidden_size=64,
        ffn_size=96,
        rope=Rope(10_000.0, 16),
        context_len=256,
        tie_embeddings=False,
        bos_id=1,
        eos_ids=(2,),
    )


def test_the_generation_config_has_the_last_word_on_end_tokens() -> None:
    assert from_hf(LLAMA, {"eos_token_id": [2, 7]}, "tiny").eos_ids == (2, 7)
    assert from_hf(LLAMA | {"eos_token_id": None}, {}, "tiny").eos_ids == ()


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_from_files_old_and_new(layout: str) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    new = {"rope_parameters": scaling | {"rope_theta": 5e5}}
    old = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}
    given = new if layout == "rope_parameters" else old
    assert from_hf(LLAMA | given, {}, "tiny").rope == Rope(5e5, 16, (4.0,) * 8)


def test_yarn_stretches_the_context_where_the_file_states_the_length_before() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert from_hf(LLAMA | {"rope_scaling": scaling}, {}, "tiny").context_len == 1024


def test_keys_that_nobody_knows_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from_hf(LLAMA | {"use_cache": True, "quantization_config": {}, "attention_sinks": 4, "fancy": None}, {}, "tiny")
    (record,) = caplog.records
    assert record.getMessage().endswith("['attention_sinks']")


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITH_IMAGES - WITH_TOWERS - ENCODERS))
def test_a_model_type_names_a_family_where_there_is_no_architecture(family: str) -> None:
    config = PUBLISHED[family]
    values = {key: value for key, value in config.items() if key != "architectures"} | {"model_type": family}
    assert from_hf(values, {}, "tiny") == from_hf(config, {}, "tiny")


COMMON: dict[str, Any] = LLAMA | {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True}
SIGMOIDS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "topk_group": 2,
}
NEXT_TOKENS = "num_nextn_predict_layers"
LATENTS: dict[str, Any] = {
    "attention_bias": False,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "topk_method": "noaux_tc",
    "v_head_dim": 20,
}
KIMI_DELTA: dict[str, Any] = {"head_dim": 24, "num_heads": 8, "short_conv_kernel_size": 4}
KIMIS_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
INDEXERS: dict[str, Any] = {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 64}
GROWING: dict[str, Any] = {
    "factor": 4.0,
    "llama_4_scaling_beta": 0.1,
    "max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e6,
    "type": "yarn",
}
GEMMA4_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
DELTA_NETS: dict[str, Any] = {
    "attention_bias": False,
    "full_attention_interval": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
}
SHARED_MOE: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 40,
}
QWEN3_5: dict[str, Any] = DELTA_NETS | {
    "attn_output_gate": True,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "deepseek_v3": COMMON
    | {"architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid"}
    | SIGMOIDS
    | LATENTS,
    "deepseek_v32": COMMON
    | {"architectures": ["DeepseekV32ForCausalLM"], "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid"}
    | INDEXERS
    | SIGMOIDS
    | LATENTS,
    "glm_moe_dsa": COMMON
    | {"architectures": ["GlmMoeDsaForCausalLM"], "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid"}
    | {"head_dim": 16, "qk_head_dim": 40, "rope_interleave": True, "indexer_rope_interleave": True}
    | INDEXERS
    | SIGMOIDS
    | LATENTS,
    "glm4_moe": COMMON
    | {"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 32, "partial_rotary_factor": 0.5}
    | {"use_qk_norm": True, "rope_theta": 1e6}
    | SIGMOIDS,
    "glm4_moe_lite": COMMON
    | {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["sparse", "dense"], "rope_interleave": True}
    | SIGMOIDS
    | LATENTS,
    "minimax_m2": COMMON
    | {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 32, "rotary_dim": 16, "num_local_experts": 16}
    | {"num_experts_per_tok": 4, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    | {"qk_norm_type": "per_layer", "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3}
    | {"mtp_transformer_layers": 1, "attn_type_list": [1, 1], "rope_theta": 5e6},
    "kimi_linear": {key: value for key, value in (COMMON | LATENTS).items() if key not in KIMIS_NAMES}
    | {"architectures": ["KimiLinearForCausalLM"], "head_dim": 16, "hidden_act": "silu", "q_lora_rank": None}
    | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], **KIMI_DELTA}, "mla_use_nope": True}
    | {"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "moe_layer_freq": 1, "rope_theta": 1e4}
    | {KIMIS_NAMES.get(key, key): value for key, value in SIGMOIDS.items()}
    | {"model_max_length": 256, "rope_scaling": None},
    "nemotron": {key: value for key, value in COMMON.items() if key not in ("rms_norm_eps", "hidden_act")}
    | {"architectures": ["NemotronForCausalLM"], "norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 1e4}
    | {"attention_bias": False, "mlp_bias": False, "head_dim": 32},
    "nemotron_h": {key: value for key, value in COMMON.items() if key not in ("rms_norm_eps", "num_hidden_layers")}
    | {"architectures": ["NemotronHForCausalLM"], "head_dim": 32, "layer_norm_epsilon": 1e-5, "chunk_size": 128}
    | {"hybrid_override_pattern": "ME*-EM", "num_hidden_layers": 6, "mlp_hidden_act": "relu2", "expand": 2}
    | {"mamba_num_heads": 8, "mamba_head_dim": 24, "n_groups": 4, "ssm_state_size": 16, "conv_kernel": 4}
    | {"mamba_hidden_act": "silu", "mamba_proj_bias": False, "use_bias": False, "use_conv_bias": True}
    | {"time_step_floor": 1e-4, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001}
    | {"attention_bias": False, "mlp_bias": False, "residual_in_fp32": False, "sliding_window": None}
    | {"moe_latent_size": 24, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True}
    | {key: value for key, value in SIGMOIDS.items() if key != "first_k_dense_replace"},
    "lfm2": {key: value for key, value in COMMON.items() if key not in ("rms_norm_eps", "intermediate_size")}
    | {"architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "block_ff_dim": 144, "block_multiple_of": 32}
    | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3, "conv_bias": False}
    | {"full_attn_idxs": [1], "theta": 1e6, "rope_theta": 1e6, "conv_dim": 64, "block_norm_eps": 1e-5},
    "lfm2_moe": {key: value for key, value in COMMON.items() if key != "rms_norm_eps"}
    | {"architectures": ["Lfm2MoeForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": True}
    | {"layer_types": ["conv", "full_attention"], "rope_theta": 1e6, "num_dense_layers": 1, "use_expert_bias": True}
    | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}
    | {"routed_scaling_factor": 1.0, "tie_embedding": False},
    "qwen2_moe": COMMON
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False}
    | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 192, "decoder_sparse_step": 1}
    | {"use_sliding_window": False, "sliding_window": 2048, "max_window_layers": 2, "rope_theta": 1e6},
    "mistral4": COMMON
    | {"architectures": ["Mistral4ForCausalLM"], "head_dim": 40, "qk_head_dim": 40, "rope_interleave": True}
    | {"rope_parameters": GROWING | {"partial_rotary_factor": 0.4}}
    | {key: value for key, value in (SIGMOIDS | LATENTS).items() if key not in ("topk_method", NEXT_TOKENS)},
    "ministral3": COMMON
    | {"architectures": ["Ministral3ForCausalLM"], "sliding_window": None, "head_dim": 32, "rope_parameters": GROWING},
    "seed_oss": COMMON
    | {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
    | {"head_dim": 32, "residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7},
    "glm4": COMMON
    | {"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "head_dim": 32, "partial_rotary_factor": 0.5},
    "ernie4_5": COMMON | {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 32, "use_bias": False},
    "ernie4_5_moe": COMMON
    | {"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": False, "moe_num_experts": 16, "moe_k": 4}
    | {"moe_intermediate_size": 48, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_norm_min": 1e-12}
    | {"moe_layer_end_index": -1, "moe_layer_interval": 1, "head_dim": 32},
    "olmo2": COMMON | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "rope_theta": 5e5},
    "exaone4": COMMON
    | {"architectures": ["Exaone4ForCausalLM"], "head_dim": 32, "sliding_window": 64, "sliding_window_pattern": "LG"}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "ministral": COMMON
    | {"architectures": ["MinistralForCausalLM"], "sliding_window": 64, "head_dim": 32}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "olmo3": COMMON
    | {"architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "rope_theta": 5e5, "sliding_window": 128}
    | {"layer_types": ["sliding_attention", "full_attention"], "rope_scaling": {"type": "linear", "factor": 2.0}},
    "granite": COMMON
    | {"architectures": ["GraniteForCausalLM"], "attention_bias": False, "mlp_bias": False, "logits_scaling": 8.0}
    | {"attention_multiplier": 0.015, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "llama4_text": COMMON
    | {"architectures": ["Llama4ForCausalLM"], "attention_bias": False, "attention_chunk_size": 32, "head_dim": 32}
    | {"attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192, "for_llm_compressor": False}
    | {"hidden_act": "silu", "interleave_moe_layer_step": 2, "intermediate_size_mlp": 192, "no_rope_layers": [1, 0]}
    | {"num_experts_per_tok": 1, "num_local_experts": 16, "rope_theta": 5e5, "use_qk_norm": True},
    "mistral": COMMON | {"architectures": ["MistralForCausalLM"], "sliding_window": 100},
    "mixtral": COMMON
    | {"architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_local_experts": 8}
    | {"num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2": COMMON
    | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 131072}
    | {"max_window_layers": 28, "rope_theta": 1e6},
    "qwen3": COMMON
    | {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "sliding_window": None}
    | {"max_window_layers": 28, "head_dim": 32, "rope_theta": 1e6, "attention_bias": False},
    "qwen3_moe": COMMON
    | {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 32}
    | {"moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 16, "num_experts_per_tok": 4}
    | {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 2, "rope_theta": 1e6},
    "qwen3_next": COMMON
    | {"architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": []}
    | {"norm_topk_prob": True, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 1e7}
    | DELTA_NETS
    | SHARED_MOE,
    "qwen3_5_text": COMMON | {"architectures": ["Qwen3_5ForCausalLM"]} | QWEN3_5,
    "qwen3_5_moe_text": {key: value for key, value in COMMON.items() if key != "intermediate_size"}
    | {"architectures": ["Qwen3_5MoeForCausalLM"]}
    | QWEN3_5
    | SHARED_MOE,
    "gemma2": COMMON
    | {"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}
    | {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {"query_pre_attn_scalar": 224, "sliding_window": 4096, "cache_implementation": "hybrid"},
    "gemma3_text": COMMON
    | {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256}
    | {"rope_local_base_freq": 12_000, "rope_theta": 1e6, "rope_scaling": None, "sliding_window": 512}
    | {"sliding_window_pattern": 2},
    "gemma4_text": COMMON
    | {"architectures": ["Gemma4ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16}
    | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 512}
    | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "attention_bias": False}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100, "use_double_wide_mlp": True}
    | {"enable_moe_block": False, "num_experts": None, "top_k_experts": 2, "moe_intermediate_size": 24}
    | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
    | {"rope_parameters": GEMMA4_ROPES},
    "gpt_oss": COMMON
    | {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "num_local_experts": 32}
    | {"experts_per_token": 4, "num_experts_per_tok": 4, "initial_context_length": 64, "sliding_window": 128}
    | {"layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0, "rope_theta": 150_000}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "router_aux_loss_coef": 0.9, "hidden_act": "silu"},
    "phi3": COMMON
    | {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128, "sliding_window": 64}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, "embd_pdrop": 0.0},
}
SIGMOID_MOE = Moe(
    num_experts=16,
    experts_per_token=4,
    ffn_size=48,
    normalize=True,
    dense_layers=frozenset({0}),
    scoring="sigmoid",
    choice_bias=True,
    num_groups=4,
    num_groups_kept=2,
    scale=2.5,
    shared_ffn_size=48,
)


def divisors_of(theta: float, dim: int) -> tuple[float, ...]:
    """As a Llama with the same YaRN has them."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": theta}
    return from_hf(LLAMA | {"head_dim": dim, "rope_parameters": yarn}, {}, "tiny").rope.divisors


LATENT_ATTENTION: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_dim": 48,
    "rope": Rope(1e4, 16, start=32),
    "query_scale": 40**-0.5,
    "latent": Latent(48, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6),
}
GROWTH: dict[str, Any] = {"query_growth": QueryGrowth(64, 0.1)}
HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "rope": Rope(1e7, 8),
    "qk_norm": "heads",
    "norm_offset": 1.0,
    "attention_gate": True,
    "num_next_layers": 1,
    "recurrent": Recurrent((0,), DeltaNet(2, 4, 8, 12, 4)),
}
GATED_MOE = Moe(16, 4, 48, normalize=True, shared_ffn_size=40, shared_gate=True)
DIFFERENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_next": HYBRID | {"moe": GATED_MOE},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | {"moe": GATED_MOE, "ffn_size": 48},
    "deepseek_v3": LATENT_ATTENTION | {"moe": SIGMOID_MOE, "num_next_layers": 1},
    "deepseek_v32": LATENT_ATTENTION | {"moe": SIGMOID_MOE, "indexer": Indexer(4, 32, 64, False, (0, 1))},
    "glm_moe_dsa": LATENT_ATTENTION | {"moe": SIGMOID_MOE, "indexer": Indexer(4, 32, 64, True, (0, 1))},
    "glm4_moe": {"head_dim": 32, "rope": Rope(1e6, 16), "qkv_bias": True, "qk_norm": "heads", "moe": SIGMOID_MOE}
    | {"num_next_layers": 1},
    "glm4_moe_lite": LATENT_ATTENTION
    | {"moe": replace(SIGMOID_MOE, dense_layers=frozenset({1})), "num_next_layers": 1},
    "kimi_linear": LATENT_ATTENTION
    | {
        "rope": replace(Rope.still(16), start=32),
        "latent": Latent(0, 32, 24, 16, 20, interleaved=False, norm_eps=1e-6),
        "moe": SIGMOID_MOE,
        "recurrent": Recurrent((0,), KimiDelta(8, 24, 4)),
    },
    "nemotron": {
        "head_dim": 32,
        "rope": Rope(1e4, 16),
        "activation": "relu_squared",
        "centred_norms": True,
        "norm_offset": 1.0,
    },
    "nemotron_h": {
        "num_layers": 4,  # a state and experts, attention and a network, experts, a state
        "head_dim": 32,
        "rope": Rope.still(32),
        "activation": "relu_squared",
        "moe": replace(SIGMOID_MOE, dense_layers=frozenset({1, 3}), shared_ffn_size=40, latent_size=24),
        "recurrent": Recurrent((0, 3), Mamba2(8, 24, 4, 16, 4, 0.001)),
        "ffn_only": frozenset({2}),
        "without_ffn": frozenset({3}),
    },
    "lfm2": {
        "ffn_size": 96,
        "rope": Rope(1e6, 16),
        "qk_norm": "heads",
        "tie_embeddings": True,
        "recurrent": Recurrent((0,), ShortConv(64, 3)),
    },
    "lfm2_moe": {
        "rope": Rope(1e6, 16),
        "qk_norm": "heads",
        "moe": Moe(16, 4, 48, normalize=True, dense_layers=frozenset({0}), scoring="sigmoid", choice_bias=True),
        "recurrent": Recurrent((0,), ShortConv(64, 3, has_bias=True)),
    },
    "minimax_m2": {
        "head_dim": 32,
        "rope": Rope(5e6, 16),
        "qk_norm": "all",
        "moe": Moe(16, 4, 96, normalize=True, scoring="sigmoid", choice_bias=True),
    },
    "qwen2_moe": {
        "rope": Rope(1e6, 16),
        "qkv_bias": True,
        "moe": Moe(16, 4, 48, normalize=False, shared_ffn_size=192, shared_gate=True),
    },
    "mistral4": LATENT_ATTENTION
    | {
        "rope": Rope(1e6, 16, divisors_of(1e6, 16), start=32),
        "query_scale": pytest.approx(40**-0.5 * (0.1 * math.log(4) + 1) ** 2),
        "moe": replace(SIGMOID_MOE, scoring="softmax", choice_bias=False),
    }
    | GROWTH,
    "ministral3": {"head_dim": 32, "rope": Rope(1e6, 32, divisors_of(1e6, 32))} | GROWTH,
    "seed_oss": {"head_dim": 32, "rope": Rope(1e7, 32), "qkv_bias": True},
    "glm4": {"head_dim": 32, "rope": Rope(1e4, 16, interleaved=True), "qkv_bias": True, "post_norms": True},
    "ernie4_5": {"head_dim": 32, "rope": Rope(5e5, 32, interleaved=True), "tie_embeddings": True},
    "ernie4_5_moe": {
        "head_dim": 32,
        "rope": Rope(5e5, 32, interleaved=True),
        "tie_embeddings": True,
        "moe": Moe(16, 4, 48, normalize=True, dense_layers=frozenset({0}), choice_bias=True, shared_ffn_size=96),
    },
    "olmo2": {"rope": Rope(5e5, 16), "qk_norm": "all", "pre_norms": False, "post_norms": True},
    "exaone4": {
        "head_dim": 32,
        "rope": Rope(1e4, 32),
        "windows": (64, 0),
        "still_layers": frozenset({1}),
        "qk_norm": "heads",
        "pre_norms": False,
        "post_norms": True,
    },
    "ministral": {"head_dim": 32, "rope": Rope(1e4, 32), "windows": (0, 64)},
    "olmo3": {
        "rope": Rope(5e5, 16, (2.0,) * 8),
        "local_rope": Rope(5e5, 16),
        "windows": (128, 0),
        "qk_norm": "all",
        "pre_norms": False,
        "post_norms": True,
    },
    "granite": {
        "embedding_scale": 12.0,
        "scales_given_rows": True,
        "query_scale": 0.015,
        "residual_scale": 0.22,
        "logits_divisor": 8.0,
    },
    "llama4_text": {
        "head_dim": 32,
        "ffn_size": 192,
        "rope": Rope.still(32),
        "local_rope": Rope(5e5, 32, interleaved=True),
        "windows": (32, 0),
        "chunked": True,
        "qk_norm": "unweighted",
        "query_growth": QueryGrowth(8192, 0.1, still_only=True, counts_itself=True),
        "moe": Moe(
            *(16, 1, 96),
            normalize=False,
            dense_layers=frozenset({0}),
            scoring="sigmoid",
            shared_ffn_size=96,
            scales_inputs=True,
        ),
    },
    "mistral": {"windows": (100, 100)},
    "mixtral": {"rope": Rope(1e6, 16), "moe": Moe(8, 2, 96, normalize=True)},
    "qwen2": {"rope": Rope(1e6, 16), "qkv_bias": True},
    "qwen3": {"rope": Rope(1e6, 32), "head_dim": 32, "qk_norm": "heads"},
    "qwen3_moe": {
        "rope": Rope(1e6, 32),
        "head_dim": 32,
        "qk_norm": "heads",
        "moe": Moe(16, 4, 48, normalize=True),
    },
    "gemma2": {
        "rope": Rope(1e4, 256),
        "head_dim": 256,
        "windows": (4096, 0),
        "attention_softcap": 50.0,
        "logits_softcap": 30.0,
        "query_scale": 224**-0.5,
    },
    "gemma3_text": {
        "rope": Rope(1e6, 256),
        "head_dim": 256,
        "windows": (512, 0),
        "local_rope": Rope(12_000.0, 256),
        "query_scale": 1 / 16,
        "qk_norm": "heads",
    },
    "gemma4_text": {
        "rope": Rope(1e6, 32, (1.0,) * 4 + (math.inf,) * 12),
        "windows": (512, 0),
        "local_rope": Rope(1e4, 16),
        "query_scale": 1.0,
        "qk_norm": "heads",
        "value_norm": True,
        "norm_offset": 0.0,
        "wide": WideHeads(32, 1, 1, 2, keys_are_values=True),
        "borrowing_ffn_size": 192,
        "per_layer_dim": 8,
        "layer_scales": True,
        "logits_softcap": 30.0,
    },
    "gpt_oss": {
        "rope": Rope(150_000.0, 64, (2.0,) * 32),
        "head_dim": 64,
        "windows": (128, 0),
        "qkv_bias": True,
        "o_bias": True,
        "sinks": True,
        "activation": ClampedSwiglu(alpha=1.702, limit=7.0),
        "moe": Moe(32, 4, 96, normalize=True, router_bias=True, expert_bias=True),
    },
    "phi3": {
        "rope": Rope(1e4, 16, (2.0,) * 8, math.sqrt(1 + math.log(2) / math.log(128))),
        "windows": (64, 64),
    },
}
GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh",
    "post_norms": True,
    "norm_offset": 1.0,
    "embedding_scale": 8.0,
    "tie_embeddings": True,
}


def test_a_window_of_all_layers_that_no_text_outgrows_is_none() -> None:
    values = PUBLISHED["mistral"] | {"model_type": "mistral"}
    for window, windows in ((255, (255, 255)), (256, ()), (None, ())):
        assert from_hf(values | {"sliding_window": window}, {}, "tiny").windows == windows


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITH_IMAGES - WITH_TOWERS - ENCODERS))
def test_configurations_as_they_are_published_are_read_whole(family: str, caplog: pytest.LogCaptureFixture) -> None:
    different = (GEMMA if family.startswith("gemma") else {}) | DIFFERENT[family]
    expected = replace(from_hf(LLAMA, {}, "tiny"), architecture=family, **different)
    assert from_hf(PUBLISHED[family], {}, "tiny") == expected
    assert caplog.records == []


SIGLIP: dict[str, Any] = {  # as the folders of all sizes say it
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}


def test_a_gemma_that_knows_images_is_read_with_the_defaults_of_its_format(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file of the 4B model, which leaves out most of its shape."""
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": SIGLIP,
    }
    config = from_hf(values, {}, "gemma")
    assert caplog.records == []
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.rope, config.local_rope) == (Rope(1e6, 256, (8.0,) * 128), Rope(1e4, 256))
    assert config.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert (config.eos_ids, config.tie_embeddings, config.context_len) == ((1, 106), True, 131_072)


def test_a_gemma_4_that_knows_images_is_read_for_text_and_new_files_list_its_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Files of transformers before and after it wrote what differs layer by layer."""
    text = {key: value for key, value in PUBLISHED["gemma4_text"].items() if not key.endswith("_token_id")}
    text |= {"model_type": "gemma4_text", "num_global_key_value_heads": None, "global_head_dim": None}
    text |= {"per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}}
    values: dict[str, Any] = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    values |= {"vision_config": {}, "audio_config": None, "image_token_id": 9, "eos_token_id": [1, 7]}
    expected = from_hf(PUBLISHED["gemma4_text"], {}, "tiny")
    assert from_hf(values, {}, "tiny") == replace(expected, architecture="gemma4", bos_id=2, eos_ids=(1, 7))
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: images and sounds are not supported; the model is served for text"
    ]


def test_the_last_layer_of_gemma_4_has_no_window_whatever_is_said_of_it() -> None:
    types = {"layer_types": ["sliding_attention"] * 2}
    assert from_hf(PUBLISHED["gemma4_text"] | types, {}, "tiny").windows == (512, 0)
    six = PUBLISHED["gemma4_text"] | {"layer_types": None, "num_hidden_layers": 8}
    assert from_hf(six, {}, "tiny").windows == (*(512,) * 5, 0, 512, 0)


def with_images(text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"model_type": "mistral3", "vision_config": {}}
    values |= {"architectures": ["Mistral3ForConditionalGeneration"]}
    values |= {"image_token_index": 10, "multimodal_projector_bias": False, "projector_hidden_act": "gelu"}
    return values | {"spatial_merge_size": 2, "vision_feature_layer": -1, "text_config": text} | outer


@pytest.mark.parametrize("family", ["mistral", "ministral3", "mistral4"])
def test_a_mistral_that_knows_images_is_read_for_text_as_its_family(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = PUBLISHED[family] | {"model_type": family}
    config = from_hf(with_images(text), {}, "tiny")
    assert config == replace(from_hf(PUBLISHED[family], {}, "tiny"), architecture="mistral3")
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: images are not supported; the model is served for text"
    ]


def test_whether_such_a_mistral_is_tied_its_text_says_first() -> None:
    text: dict[str, Any] = {key: value for key, value in PUBLISHED["ministral3"].items() if not key.endswith("_id")}

    def read(text: dict[str, Any], **outer: Any) -> ModelConfig:
        return from_hf(with_images(text | {"model_type": "ministral3"}, **outer), {}, "tiny")

    assert read(text | {"tie_word_embeddings": True}, tie_word_embeddings=False).tie_embeddings
    assert read(text, tie_word_embeddings=True).tie_embeddings
    assert (read(text).tie_embeddings, read(text).bos_id, read(text).eos_ids) == (False, 1, (2,))


def test_a_mistral_with_images_and_a_text_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="text_config of model_type qwen3 is not supported"):
        from_hf(with_images(PUBLISHED["qwen3"] | {"model_type": "qwen3"}), {}, "tiny")


def test_a_llama_4_that_knows_images_is_read_for_text(caplog: pytest.LogCaptureFixture) -> None:
    text = {key: value for key, value in PUBLISHED["llama4_text"].items() if key != "architectures"}
    values: dict[str, Any] = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": text | {"no_rope_layers": [], "num_hidden_layers": 8, "attention_chunk_size": None},
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 1408},
    }
    with pytest.raises(ConfigError, match="attention_chunk_size=None"):
        from_hf(values, {}, "scout")
    caplog.clear()
    del values["text_config"]["attention_chunk_size"]
    config = from_hf(values, {}, "scout")
    assert [record.getMessage() for record in caplog.records] == [
        "scout: images are not supported; the model is served for text"
    ]
    assert config.windows == (8192, 8192, 8192, 0) * 2
    assert config.moe is not None
    assert config.moe.dense_layers == {0, 2, 4, 6}


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (np.zeros((3, 96, 64), np.float32), r"not the tensors of 16 experts"),
        (np.zeros((16, 96), np.float32), r"not the tensors of 16 experts"),
        (QuantizedArray("float16", np.zeros((16, 96), np.float16)), "is quantised"),
    ],
    ids=["too few", "two dimensions", "quantised"],
)
def test_experts_in_one_tensor_that_are_not_a_llama_4s_are_refused(tensor: Any, named: str) -> None:
    config = from_hf(PUBLISHED["llama4_text"], {}, "tiny")
    name = "model.layers.1.feed_forward.experts.down_proj"
    with pytest.raises(ConfigError, match=named):
        list(FAMILIES["llama4_text"].unstack(config, (name, tensor)))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_qwen_that_knows_images_is_read_for_text(family: str, caplog: pytest.LogCaptureFixture) -> None:
    published = PUBLISHED[f"{family}_text"]
    text = {key: value for key, value in published.items() if key != "architectures"}
    values: dict[str, Any] = {"image_token_id": 248056, "video_token_id": 248057, "vision_config": {"depth": 27}}
    values |= {"vision_start_token_id": 248053, "vision_end_token_id": 248054, "tie_word_embeddings": False}
    values |= {"architectures": [FAMILIES[family].architecture], "model_type": family, "text_config": text}
    assert from_hf(values, {}, "tiny") == replace(from_hf(published, {}, "tiny"), architecture=family)
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: images are not supported; the model is served for text"
    ]


def test_what_qwen3_next_keeps_together_comes_apart_by_heads() -> None:
    """Each row of two key heads and four value heads says whose it is."""
    config, unstack = from_hf(PUBLISHED["qwen3_next"], {}, "tiny"), FAMILIES["qwen3_next"].unstack
    kinds = [["q"] * 8 + ["k"] * 8 + ["v"] * 24 + ["z"] * 24, ["b"] * 2 + ["a"] * 2]
    for kind, name in zip(kinds, ("qkvz", "ba"), strict=True):
        rows = np.array([f"{each}{head}" for head in range(2) for each in kind])[:, None]
        parts = dict(unstack(config, (f"model.layers.0.linear_attn.in_proj_{name}.weight", rows)))
        found = {key.removesuffix(".weight")[-3:]: "".join(np.asarray(part)[:, 0]) for key, part in parts.items()}
        if name == "ba":
            assert found == {"j_b": "b0b0b1b1", "j_a": "a0a0a1a1"}
        else:
            assert found["j_z"] == "z0" * 24 + "z1" * 24
            assert found["qkv"] == "q0" * 8 + "q1" * 8 + "k0" * 8 + "k1" * 8 + "v0" * 24 + "v1" * 24


def test_queries_and_gates_come_apart_also_where_they_are_quantised() -> None:
    config = from_hf(PUBLISHED["qwen3_5_text"], {}, "tiny")
    rows = np.arange(256, dtype=np.float16)[:, None].repeat(8, axis=1)
    for tensor in (rows, QuantizedArray("float16", rows)):
        parts = FAMILIES["qwen3_5_text"].unstack(config, ("model.layers.1.self_attn.q_proj.weight", tensor))
        (first, queries), (second, gates) = [(name.split(".")[-2], as_floats(part)[:, 0]) for name, part in parts]
        assert (first, second) == ("q_proj", "gate_proj")
        assert queries.tolist() == [64 * head + i for head in range(4) for i in range(32)]
        assert (gates == queries + 32).all()


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("linear_attn.in_proj_qkvz.weight", "has 7 rows, not 64 for 2 heads"),
        ("linear_attn.in_proj_ba.weight", "has 7 rows, not 4 for 2 heads"),
        ("self_attn.q_proj.weight", "has 7 rows, not 64 for 4 heads"),
    ],
)
def test_what_does_not_come_apart_by_heads_is_refused(name: str, named: str) -> None:
    config = from_hf(PUBLISHED["qwen3_next"], {}, "tiny")
    with pytest.raises(ConfigError, match=named):
        list(FAMILIES["qwen3_next"].unstack(config, (f"model.layers.0.{name}", np.zeros((7, 64), np.float32))))


def test_yarn_makes_all_dimensions_of_latent_attention_grow() -> None:
    """Its `mscale_all_dim` grows scores; what it does to rotated dimensions, `mscale` alone says beside it."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = from_hf(PUBLISHED["deepseek_v3"] | {"rope_scaling": yarn}, {}, "tiny")
    assert config.score_scale == pytest.approx(40**-0.5 * (0.1 * math.log(4) + 1) ** 2)
    assert (config.rope.scale, config.rope.start, len(config.rope.divisors)) == (1.0, 32, 8)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"indexer_types": ["full", "shared"]}, (0,)),
        ({"index_topk_pattern": "FS"}, (0,)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0,)),
        ({"index_topk_freq": 2}, (0, 1)),
    ],
)
def test_which_layers_choose_tokens_is_listed_or_follows_a_pattern(
    change: dict[str, Any], layers: tuple[int, ...]
) -> None:
    config = from_hf(PUBLISHED["glm_moe_dsa"] | change, {}, "tiny")
    assert config.indexer is not None
    assert config.indexer.layers == layers


def test_kimi_k2_is_read_as_what_it_says_it_is() -> None:
    published = PUBLISHED["deepseek_v3"]
    assert from_hf(published | {"model_type": "kimi_k2"}, {}, "tiny") == from_hf(published, {}, "tiny")


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "there is no sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "3 layer_types for 2 layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"attention_bias": True}, "attention_bias=True"),
        ("gemma4_text", {"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input=90"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "2 layers have no layer of their kind whose keys they could read"),
        ("gemma4_text", {"num_global_key_value_heads": 3}, "4 heads do not share"),
        ("gemma4_text", {"global_head_dim": 33}, "head_dim 33 does not fit its rotary embedding"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config other than heads"),
        ("gemma4_text", {"per_layer_config": {"1": {"hidden_size": 32}}}, "per_layer_config other than heads"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": "wide"}}}, "per_layer_config={'head_dim': 'wide'}"),
        ("gemma4_text", {"enable_moe_block": True}, "configuration has no num_experts"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type='yarn' of full"),
        ("llama", {"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
        ("llama", {"architectures": ["DeepseekV4ForCausalLM"]}, "no layer computes pages of compressed entries"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("nemotron", {"mlp_bias": True}, "mlp_bias=True"),
        ("phi3", {"attention_bias": True}, "attention_bias=True"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("gpt_oss", {"rope_scaling": None}, "no rope_parameters"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "every size of latent attention"),
        ("deepseek_v3", {"qk_rope_head_dim": 15}, "does not fit its rotary embedding"),
        ("deepseek_v3", {"v_head_dim": 1 << 20}, "v_head_dim must be a whole number"),
        ("deepseek_v32", {"index_topk": 0}, "every size of an indexer"),
        ("deepseek_v32", {"index_topk": "all"}, "index_topk must be a whole number"),
        ("deepseek_v32", {"index_head_dim": 8}, "index_head_dim 8 is less than what of it rotates"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is 0"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True"),
        ("deepseek_v32", {"mlp_bias": True}, "mlp_bias=True"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 2}, "layer_types other than indexed_attention"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "the first layer must choose"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types of 2 layers"),
        ("glm_moe_dsa", {"index_topk_pattern": "FX"}, "configuration has no 'X'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types of 2 layers"),
        ("glm4_moe_lite", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("glm4_moe", {"routed_scaling_factor": "large"}, "routed_scaling_factor must be above 0"),
        ("glm4_moe", {"n_group": 3}, "do not make 3 groups"),
        ("glm4_moe", {"num_experts_per_tok": 99}, "99 experts a token"),
        ("mistral4", {"attention_bias": True}, "attention_bias=True"),
        ("mistral4", {"rope_parameters": None}, "no rope_parameters"),
        ("mistral4", {"rope_parameters": GROWING | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("mistral4", {"rope_parameters": GROWING | {"fancy": 1}}, "fancy of rope scaling 'yarn'"),
        ("ministral3", {"rope_parameters": GROWING | {"llama_4_scaling_beta": "much"}}, "queries cannot grow"),
        ("ministral3", {"rope_parameters": GROWING | {"original_max_position_embeddings": 64.5}}, "queries cannot"),
        ("ministral3", {"max_position_embeddings": 1 << 30}, "queries would grow every 64 tokens"),
        ("ministral3", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("llama", {"rope_parameters": GROWING}, "llama_4_scaling_beta"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias=True"),
        ("glm4", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("ernie4_5", {"use_bias": True}, "use_bias=True"),
        ("ernie4_5_moe", {"moe_intermediate_size": [48, 24]}, "moe_intermediate_size"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("exaone4", {"layer_types": None}, "sliding_window_pattern='LG'"),
        ("ministral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("olmo3", {"attention_bias": True}, "attention_bias=True"),
        ("granite", {"mlp_bias": True}, "mlp_bias=True"),
        ("granite", {"attention_bias": True}, "attention_bias=True"),
        ("llama4_text", {"attention_bias": True}, "attention_bias=True"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ("llama4_text", {"layer_types": ["full_attention"] * 2}, "layer_types other than chunked_attention"),
        ("llama4_text", {"layer_types": ["chunked_attention", "other"]}, "layer_types other than"),
        ("llama4_text", {"no_rope_layers": [1, 0, 1]}, "are not of 2 layers"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size=0"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale must be at least 1"),
        ("llama4_text", {"partial_rotary_factor": 0.5}, "rotation of a part of a head"),
        ("llama4_text", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "one that scales"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "attn_type_list other than 1"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types must name"),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types must name"),
        ("qwen3_next", {"full_attention_interval": 4}, "whose layers are all linear_attention"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 2}, "whose layers are all full_attention"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "3 value heads do not share 2 key heads"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "every size of a delta net"),
        ("qwen3_next", {"linear_key_head_dim": 1 << 20}, "linear_key_head_dim must be a whole number"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ("qwen3_5_text", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate=True"),
        ("kimi_linear", {"routed_expert_hidden_size": 3584}, "routed_expert_hidden_size=3584"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "scoring_func='softmax'"),
        ("kimi_linear", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling="),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("kimi_linear", {"linear_attn_config": KIMI_DELTA | {"gate_lower_bound": -5}}, "gate_lower_bound"),
        ("kimi_linear", {"linear_attn_config": KIMI_DELTA | {"head_dim": 0}}, "every size of a recurrent layer"),
        (
            "kimi_linear",
            {"linear_attn_config": KIMI_DELTA | {"short_conv_kernel_size": 1}},
            "every size of a recurrent",
        ),
        ("kimi_linear", {"linear_attn_config": KIMI_DELTA | {"num_heads": 1 << 20}}, "linear_num_heads must be"),
        (
            "kimi_linear",
            {"linear_attn_config": KIMI_DELTA | {"full_attn_layers": [2], "kda_layers": [2]}},
            "does not list each of 2 layers once",
        ),
        ("kimi_linear", {"layer_types": ["linear_attention"]}, "layer_types of 2 layers"),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 2}, "without any attention"),
        ("nemotron_h", {"hybrid_override_pattern": "MX*"}, "blocks X are not supported"),
        ("nemotron_h", {"hybrid_override_pattern": "M-"}, "without any attention"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron_h", {"use_bias": True}, "use_bias=True"),
        ("nemotron_h", {"n_groups": 3}, "8 heads do not make 3 groups"),
        ("nemotron_h", {"n_groups": 0}, "8 heads do not make 0 groups"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts=2"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32=True"),
        ("nemotron_h", {"ssm_state_size": 0}, "every size of a recurrent layer"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention"]}, "sliding_attention"),
        ("lfm2", {"full_attn_idxs": []}, "without any attention"),
        ("lfm2", {"conv_L_cache": 1}, "every size of a recurrent layer"),
        ("lfm2_moe", {"num_experts_per_tok": 99}, "99 experts a token"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_hf(PUBLISHED[family] | change, {}, "tiny")


def test_states_beside_attention_of_two_kinds_are_refused() -> None:
    """States are kept in pages of one kind."""
    config = tiny_config(recurrent=Recurrent((0,), ShortConv(32, 3)), windows=(0, 16), wide=WideHeads(32, 1, 1, 2))
    with pytest.raises(ConfigError, match="recurrent layers beside attention of two kinds"):
        check_shapes(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_the_model_code_does_not_compute_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_hf(LLAMA | change, {}, "tiny")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="intermediate_size"):
        from_hf({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, {}, "tiny")


@pytest.mark.parametrize("change", [{"num_key_value_heads": 3}, {"head_dim": 15}, {"vocab_size": 0}])
def test_shapes_that_no_attention_can_have_do_not_validate(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        from_hf(LLAMA | change, {}, "tiny")
