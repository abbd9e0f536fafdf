"""`diptych describe`: what it says of published shapes, counted by transformers without memory for a weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import placement_of
from diptych.architectures.stages import stage_layers
from diptych.checkpoints import demo
from diptych.checkpoints.hf_folder import read_config
from diptych.checkpoints.shard import Shard
from diptych.cli.reports.model_report import Plan, as_text
from diptych.cli.sizing.describe import DescribeConfig, main, read
from diptych.common.errors import ConfigError
from diptych.engine.options.config import Quantization

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "mscale": 1.0}
YARN |= {"factor": 40.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
GLM_4_5: dict[str, Any] = {
    **{"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "n_routed_experts": 160},
    **{"moe_intermediate_size": 1536, "first_k_dense_replace": 3, "head_dim": 128, "attention_bias": True},
    **{"routed_scaling_factor": 2.5, "use_qk_norm": True},
}
GEMMA4: dict[str, Any] = {
    **{"attention_k_eq_v": True, "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 0},
    **{"sliding_window": 1024, "max_position_embeddings": 262144, "final_logit_softcapping": 30.0},
    **{"num_kv_shared_layers": 0, "vocab_size": 262144},
}
# by the name that its publisher gave it: the class, and what differs from the class's defaults
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("DeepseekV3", {"rope_parameters": YARN, "max_position_embeddings": 163840}),
    "DeepSeek-R1": ("DeepseekV3", {"rope_parameters": YARN, "max_position_embeddings": 163840}),  # key by key V3's
    "DeepSeek-V3.2": ("DeepseekV32", {"rope_parameters": YARN}),
    "GLM-5": ("GlmMoeDsa", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Kimi-K2": (
        "DeepseekV3",
        {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840}
        | {"rope_parameters": YARN | {"rope_theta": 5e4, "factor": 32.0}}
        | {"max_position_embeddings": 131072},
    ),
    "GLM-4.7-Flash": ("Glm4MoeLite", {}),
    "GLM-4.5": ("Glm4Moe", GLM_4_5),
    "GLM-4.6": ("Glm4Moe", GLM_4_5 | {"max_position_embeddings": 202752}),
    "GLM-4.5-Air": ("Glm4Moe", {"head_dim": 128, "attention_bias": True}),
    "MiniMax-M2": ("MiniMaxM2", {"rotary_dim": 64}),
    "Qwen2-57B-A14B": (
        "Qwen2Moe",
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480}
        | {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "Qwen3-235B-A22B": (
        "Qwen3Moe",
        {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4}
        | {"head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128}
        | {"num_experts_per_tok": 8, "max_position_embeddings": 40960, "norm_topk_prob": True},
    ),
    "Mixtral-8x22B": (
        "Mixtral",
        {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
        | {"sliding_window": None, "max_position_embeddings": 65536},
    ),
    "Llama-3.1-405B": (
        "Llama",
        {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
        | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
        | {"rope_parameters": LLAMA3},
    ),
    "Llama-4-Scout": ("Llama4Text", {}),
    "Llama-4-Maverick": (
        "Llama4Text",
        {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    ),
    "Gemma-3-27B": (
        "Gemma3Text",
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
        | {"vocab_size": 262208},
    ),
    "Gemma-4-31B": (
        "Gemma4Text",
        GEMMA4
        | {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "num_global_key_value_heads": 4},
    ),
    "Gemma-4-26B-A4B": (
        "Gemma4Text",
        GEMMA4
        | {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True}
        | {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "Gemma 4, as transformers makes it of nothing": ("Gemma4Text", {}),
    "gpt-oss-120b": ("GptOss", {}),
    "Mistral-Small-4": ("Mistral4", {}),
    "Ministral-3-8B": ("Ministral3", {}),
    "Seed-OSS-36B": ("SeedOss", {"hidden_size": 5120}),
    "Qwen3-Next-80B-A3B": ("Qwen3Next", {}),
    "Kimi-Linear-48B-A3B": (
        "KimiLinear",
        {
            "layer_types": [
                "full_attention" if layer in (4, 8, 12, 16, 20, 24, 27) else "linear_attention"
                for layer in range(1, 28)
            ]
        },
    ),
    "Nemotron-4-15B": ("Nemotron", {"num_key_value_heads": 8}),
    "Nemotron-3-Nano-30B-A3B": (
        "NemotronH",
        {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688}
        | {"intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        | {"mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "num_key_value_heads": 2}
        | {"routed_scaling_factor": 2.5, "max_position_embeddings": 262144},
    ),
    "Qwen3.5-9B": ("Qwen3_5Text", {}),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeText", {}),
    "Qwen3-32B": (
        "Qwen3",
        {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
    ),
}
# billions that a token meets, embeddings included, and KiB of keys and values a token
KNOWN = {
    "DeepSeek-V3": (37.6, 68.625),
    "DeepSeek-R1": (37.6, 68.625),
    "DeepSeek-V3.2": (38.4, 83.875),
    "GLM-5": (41.8, 107.25),
    "Kimi-K2": (32.9, 68.625),
    "GLM-4.7-Flash": (3.9, 52.875),
    "GLM-4.5": (33.6, 368),
    "GLM-4.6": (33.6, 368),
    "GLM-4.5-Air": (13.4, 184),
    "MiniMax-M2": (11.0, 248),
    "Qwen2-57B-A14B": (14.2, 56),
    "Qwen3-235B-A22B": (22.2, 188),
    "Mixtral-8x22B": (39.2, 224),
    "Llama-3.1-405B": (405.9, 504),
    "Llama-4-Scout": (17.2, 192),
    "Llama-4-Maverick": (17.2, 192),
    "Gemma-3-27B": (27.0, 496),
    "Gemma-4-31B": (30.7, 880),
    "Gemma-4-26B-A4B": (3.8, 220),
    "Gemma 4, as transformers makes it of nothing": (5.08, 140),
    "gpt-oss-120b": (5.7, 72),
    "Mistral-Small-4": (6.63, 22.5),
    "Ministral-3-8B": (8.49, 136),
    "Seed-OSS-36B": (36.15, 256),
    "Qwen3-Next-80B-A3B": (3.9, 24),
    "Kimi-Linear-48B-A3B": (3.5, 7.875),
    "Nemotron-4-15B": (15.6, 128),
    "Nemotron-3-Nano-30B-A3B": (3.6, 6),
    "Qwen3.5-9B": (9.0, 32),
    "Qwen3.5-35B-A3B": (3.45, 20),
    "Qwen3-32B": (32.8, 256),
}
# of models with recurrent layers: how many, each with a float32 matrix for 32 heads and three inputs of 8192 channels
RECURRENT_LAYERS = {"Qwen3-Next-80B-A3B": 36, "Qwen3.5-9B": 24, "Qwen3.5-35B-A3B": 30}
STATE_NBYTES = 32 * 128 * 128 * 4 + 8192 * 3 * 2


def described(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    assert main(DescribeConfig(model=str(folder), json=True, **options)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def is_copy(name: str, config: Any) -> bool:
    return name == "lm_head.weight" and bool(config.tie_word_embeddings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_read_and_counted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, settings = PUBLISHED[name]
    architecture = f"{family.removesuffix('Text')}ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**settings, architectures=[architecture])
    config.save_pretrained(tmp_path / name)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if not is_copy(name, config)}
    found = described(tmp_path / name, capsys, tp=4, page_size=64, kv_windows="keep")
    assert found["parameters"] == sum(tensor.numel() for tensor in state.values())
    active, kv_kib = KNOWN[name]
    assert found["active_parameters"] / 1e9 == pytest.approx(active, abs=0.05)
    assert found["kv_token_bytes"] == kv_kib * 1024
    page_nbytes = 64 * kv_kib * 1024
    state_nbytes = RECURRENT_LAYERS.get(name, 0) * STATE_NBYTES or found["state_bytes"]
    state_pages, rest = divmod(found["handed_over_bytes"]["1024"] - kv_kib * 2**20, page_nbytes)
    assert rest == 0
    assert state_pages - math.ceil(state_nbytes / page_nbytes) in (0, 1)  # cells of a state are filled up to whole KiB
    on_all = 0.04 if family == "Gemma4Text" else 0.02  # norms, latents, and what tokens give each layer, of all ranks
    assert 0 <= found["gpu"]["weights_bytes"] * 4 / 2 / found["parameters"] - 1 < on_all


@pytest.mark.parametrize(
    ("family", "text", "num_learned", "active", "kv_kib"),
    [("MistralLarge4", "MistralLarge4Text", 32, 53.1, 99), ("Kimi_K25", "DeepseekV3", 0, 37.6, 68.625)],
)
def test_of_a_model_that_knows_images_the_text_is_counted(
    family: str,
    text: str,
    num_learned: int,  # numbers that are a part of the configuration
    active: float,
    kv_kib: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForConditionalGeneration"])
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{text}Model")(config.text_config)
    head = config.text_config.vocab_size * config.text_config.hidden_size
    found = described(tmp_path, capsys, tp=4, page_size=64)
    assert found["parameters"] == sum(tensor.numel() for tensor in model.state_dict().values()) + head - num_learned
    assert found["active_parameters"] / 1e9 == pytest.approx(active, abs=0.05)
    assert found["kv_token_bytes"] == kv_kib * 1024


def test_of_a_model_that_sees_images_the_tower_is_told(
    vision_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, theirs = described(vision_model.folder, capsys), vision_model.theirs
    num_parameters = sum(tensor.numel() for tensor in theirs.model.visual.state_dict().values())
    assert found["parameters"] == sum(tensor.numel() for tensor in theirs.state_dict().values())
    assert found["tower"] == {
        "parameters": num_parameters,
        "weights_bytes": 2 * num_parameters,
        "least_image_tokens": 4,
        "most_image_tokens": 64,
        "image_token_bytes": 128,
    }
    config = read_config(vision_model.folder)
    text = as_text(config, Plan(80.0, 0.9, 1, 16, "bfloat16"))
    assert "a token for 8 by 8 pixels, 4 to 64 an image; 128 B a token until its prompt is computed" in text
    stages = described(vision_model.folder, capsys, pp=3)["stages"]
    assert sum(each["weights_bytes"] for each in stages) == 2 * found["parameters"]
    assert stages[0]["weights_bytes"] > 2 * num_parameters
    assert "on every rank of the first stage" in as_text(config, Plan(80.0, 0.9, 1, 16, "bfloat16", pp=3))


def test_of_gemma_3_4b_the_tower_and_its_256_tokens_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is published. The tower has no head, and what is behind it is one matrix and a norm."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    vision = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16}
    vision |= {"num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
    architectures = ["Gemma3ForConditionalGeneration"]
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, architectures=architectures)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config).model
    parts = [
        sum(tensor.numel() for tensor in part.parameters())
        for part in (model.language_model, model.vision_tower, model.multi_modal_projector)
    ]
    found = described(tmp_path, capsys)
    assert (found["parameters"], found["tower"]["parameters"]) == (sum(parts), sum(parts[1:]))
    assert (found["tower"]["least_image_tokens"], found["tower"]["most_image_tokens"]) == (256, 256)
    told = as_text(read_config(tmp_path), Plan(80.0, 0.9, 1, 16, "bfloat16"))
    assert "a token for 56 by 56 pixels, 256 an image" in told


def test_people_are_told_what_fits_and_what_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Qwen3Config(**PUBLISHED["Qwen3-32B"][1], architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert main(DescribeConfig(model=str(tmp_path / "config.json"), gpu_gib=141)) == 0
    told = capsys.readouterr().out
    assert "parameters   32.8 billion\n" in told
    assert "KV a token   256 KiB in bfloat16\n" in told
    assert "weights 61.02 GiB in bfloat16, at most 16,8" in told
    assert "1,024 tokens: 256 MiB, 32,768 tokens: 8 GiB" in told
    assert main(DescribeConfig(model=str(tmp_path), gpu_gib=48)) == 0
    assert "do not fit beside a KV pool: give a larger --tp, --pp or --gpu-gib" in capsys.readouterr().out


def test_schedulers_that_share_experts_have_all_but_those_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.DeepseekV3Config(**PUBLISHED["DeepSeek-V3"][1], architectures=["DeepseekV3ForCausalLM"])
    config.save_pretrained(tmp_path)
    alone, shared = described(tmp_path, capsys), described(tmp_path, capsys, dp_attention=8)
    experts = 58 * 256 * 3 * 7168 * 2048 * 2
    assert alone["gpu"]["weights_bytes"] - shared["gpu"]["weights_bytes"] == experts * 7 // 8
    assert shared["gpu"]["page_bytes"] == alone["gpu"]["page_bytes"]
    assert main(DescribeConfig(model=str(tmp_path), gpu_gib=141, tp=2, dp_attention=8)) == 0
    told = capsys.readouterr().out
    assert "\n16 GPUs      of 141 GiB, each: weights" in told
    assert "a part of the experts of 8 schedulers, at most" in told
    with pytest.raises(ConfigError, match=r"256 experts of .* are fewer than the 512 ranks"):
        main(DescribeConfig(model=str(tmp_path), dp_attention=512))


def test_schedulers_that_share_networks_have_all_but_those_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU may have no part of a group of AWQ's integers."""
    config = transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], intermediate_size=22016)
    config.save_pretrained(tmp_path)
    alone, shared = described(tmp_path, capsys, tp=2), described(tmp_path, capsys, tp=2, dp_attention=4)
    networks = 32 * 3 * 4096 * 22016 * 2
    assert alone["gpu"]["weights_bytes"] - shared["gpu"]["weights_bytes"] == networks // 2 * 3 // 4
    assert shared["gpu"]["page_bytes"] == alone["gpu"]["page_bytes"]
    assert main(DescribeConfig(model=str(tmp_path), tp=2, dp_attention=4, gpus_per_node=8)) == 0
    told = capsys.readouterr().out
    assert "a part of the feed-forward networks of 4 schedulers, at most" in told
    assert "the smallest for a request of the whole context: --tp 1\n" in told
    with pytest.raises(ConfigError, match="6 ranks do not divide the 22016 feed-forward columns"):
        main(DescribeConfig(model=str(tmp_path), dp_attention=6))
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--tp 1 with --dp-attention 8 leaves a rank 2752 of the 22016 columns of"):
        main(DescribeConfig(model=str(tmp_path), dp_attention=8))


def test_experts_in_mxfp4_take_four_bits_a_weight_and_their_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.GptOssConfig(architectures=["GptOssForCausalLM"])
    config.save_pretrained(tmp_path)
    plain = described(tmp_path, capsys)["gpu"]["weights_bytes"]
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    strips, rows = math.ceil(2880 / 128), 36 * 128 * (2 * 2880 + 2880)
    assert described(tmp_path, capsys)["gpu"]["weights_bytes"] == plain - rows * 2880 * 2 + rows * strips * (64 + 4)
    assert main(DescribeConfig(model=str(tmp_path))) == 0
    assert "GiB in bfloat16, experts in MXFP4, at most" in capsys.readouterr().out


def test_matrices_of_layers_in_fp8_take_a_byte_a_weight_and_a_scale_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    plain = described(tmp_path, capsys)["gpu"]["weights_bytes"]
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    hidden, ffn = config.hidden_size, config.intermediate_size
    weights, rows = 4 * hidden**2 + 3 * hidden * ffn, 5 * hidden + 2 * ffn
    narrow = described(tmp_path, capsys)["gpu"]["weights_bytes"]
    assert narrow == plain - config.num_hidden_layers * (weights - 4 * rows)
    assert main(DescribeConfig(model=str(tmp_path))) == 0
    assert "in bfloat16, matrices of layers in FP8, at most" in capsys.readouterr().out
    asked: list[tuple[Quantization, int]] = [("none", plain), ("fp8", narrow)]
    for quantization, nbytes in asked:
        assert main(DescribeConfig(model=str(tmp_path), quantization=quantization, json=True)) == 0
        assert json.loads(capsys.readouterr().out)["gpu"]["weights_bytes"] == nbytes


PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}
ROWS = {"format": "int-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
PACKED, ROWS = (each | {"quant_method": "compressed-tensors"} for each in (PACKED, ROWS))


@pytest.mark.parametrize(
    ("quantization", "strip_nbytes", "row_nbytes", "said"),  # of 128 columns of experts, of 2048 others; with scales
    [
        ({"quant_method": "awq", "group_size": 128}, 64 + 4, 16 * (64 + 8), "experts in INT4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 64 + 4, 16 * 64 + 8, "matrices of layers in INT4"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, 256, 4096, "GiB in bfloat16, at most"),
        ({"quant_method": "gptq", "bits": 8, "sym": True}, 256, 16 * (128 + 4), "matrices of layers in INT8"),
        (PACKED, 64 + 4 * 4, 16 * (64 + 4 * 4), "experts in INT4"),
        (ROWS, 256, 16 * 128 + 4, "matrices of layers in INT8"),
    ],
)
def test_integers_are_counted_as_gpus_keep_them(
    quantization: dict[str, Any],
    strip_nbytes: int,
    row_nbytes: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    config = transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=2, **sizes)
    config.save_pretrained(tmp_path)
    plain = described(tmp_path, capsys)["gpu"]["weights_bytes"]
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    strips, rows = 2 * 128 * 3 * 768 * 2048 // 128, 2 * (2 * 16 + 2 * 4) * 128  # queries, keys, values, outputs
    narrow = plain - strips * (256 - strip_nbytes) - rows * (4096 - row_nbytes)
    assert described(tmp_path, capsys)["gpu"]["weights_bytes"] == narrow
    assert described(tmp_path, capsys, quantization="none")["gpu"]["weights_bytes"] == plain
    assert main(DescribeConfig(model=str(tmp_path))) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("quantization", "tp", "words"),
    [
        ({"quant_method": "awq", "group_size": 128}, 2, ""),
        ({"quant_method": "awq", "group_size": 128}, 4, r"192 of the 768 columns of model\.layers\.0\.mlp\.experts\.0"),
        ({"quant_method": "awq", "group_size": 128, "modules_to_not_convert": ["down_proj"]}, 4, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 4, "a group of 128 codes that share a scale"),
        ({"quant_method": "fp8"}, 4, ""),
        (PACKED, 4, ""),
        ({"quant_method": "bitsandbytes"}, 1, "quant_method 'bitsandbytes' is not supported"),
    ],
)
def test_ranks_that_would_divide_groups_are_refused_before_any_gpu_is_rented(
    quantization: dict[str, Any], tp: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    sizes |= {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
    transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **sizes).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    if words:
        with pytest.raises(ConfigError, match=words):
            main(DescribeConfig(model=str(tmp_path), tp=tp))
    else:
        assert main(DescribeConfig(model=str(tmp_path), tp=tp)) == 0
    if tp > 1:
        assert main(DescribeConfig(model=str(tmp_path), tp=tp, quantization="none")) == 0


GEMMA3_27B: dict[str, Any] = {
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "sliding_window": 1024,
}
WIDE: dict[str, Any] = {
    "num_attention_heads": 32,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
DENSE: dict[str, Any] = WIDE | {"num_hidden_layers": 60, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
DENSE |= {"hidden_size": 5376, "intermediate_size": 21504, "sliding_window": 1024}
FEW_HEADS: dict[str, Any] = WIDE | {"num_hidden_layers": 30, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
FEW_HEADS |= {"hidden_size": 2816, "sliding_window": 1024}
LENT: dict[str, Any] = {
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
}
LENT |= {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "hidden_size": 1536}
LENT |= {"global_head_dim": 512, "sliding_window": 512}
# by family: settings, KiB a token in layers that see all, what the others see, and in how many groups these are
WINDOWED: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "Gemma 3 27B": ("Gemma3Text", GEMMA3_27B, 10 * 8, 1024, 6),  # 52 layers: the last group has two
    "gpt-oss-120b": ("GptOss", {}, 18 * 2, 128, 1),
    "Gemma 4, a wide layer is a half of another": ("Gemma4Text", DENSE, 10 * 8, 1024, 10),  # fives
    "Gemma 4, two narrow layers and a half are all wide ones": ("Gemma4Text", FEW_HEADS, 5 * 4, 1024, 13),  # pairs
    "Gemma 4, a wide layer is two others, later ones borrow": ("Gemma4Text", LENT, 3 * 2, 512, 2),  # sixes
    "Mistral 7B": ("Mistral", {"max_position_embeddings": 32768}, 4 * 4, 4096, 7),  # four of 32 keep all
}


@pytest.mark.parametrize("name", WINDOWED)
def test_of_layers_with_windows_what_is_live_is_counted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, settings, kv_kib, window, num_groups = WINDOWED[name]
    architecture = f"{family.removesuffix('Text')}ForCausalLM"
    getattr(transformers, f"{family}Config")(**settings, architectures=[architecture]).save_pretrained(tmp_path)
    kept, freed = (described(tmp_path, capsys, kv_windows=each, page_size=16) for each in ("keep", "free"))
    page_nbytes = 16 * kv_kib * 1024
    assert (freed["kv_token_bytes"], freed["gpu"]["page_bytes"]) == (kv_kib * 1024, page_nbytes)
    assert freed["kv_window_bytes"] == num_groups * (window // 16 + 2) * page_nbytes
    assert kept["kv_window_bytes"] == 0
    for num_tokens, nbytes in freed["handed_over_bytes"].items():
        of_all, of_windows = int(num_tokens) // 16, window // 16
        assert nbytes == (of_all + num_groups * min(of_all, of_windows)) * page_nbytes
        if int(num_tokens) > window:
            assert nbytes < kept["handed_over_bytes"][num_tokens]
    assert freed["gpu"]["weights_bytes"] == kept["gpu"]["weights_bytes"]


def test_people_are_told_what_windows_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Gemma3TextConfig(**GEMMA3_27B, architectures=["Gemma3ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert main(DescribeConfig(model=str(tmp_path), kv_windows="free")) == 0
    told = capsys.readouterr().out
    assert "KV           keys and values of 10 layers, 16 heads of 128\n" in told
    assert "KV a token   80 KiB in bfloat16, of layers that see all\n" in told
    assert "KV windows   495 MiB a request at most, in 52 layers that see 1,024 tokens\n" in told
    assert " tokens, less 396 pages a request for windows\n" in told


def test_people_are_told_of_layers_whose_heads_have_two_widths_and_of_windows_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (
        (
            "Gemma 4, a wide layer is a half of another",
            "KV           keys and values of 10 layers, 4 heads of 512\n"
            "KV           keys and values of 50 layers, 16 heads of 256\n"
            "KV a token   80 KiB in bfloat16, of layers that see all\n"
            "KV windows   825 MiB a request at most, in 50 layers that see 1,024 tokens\n",
        ),
        (
            "Mistral 7B",
            "KV           keys and values of 4 layers, 8 heads of 128\n"
            "KV a token   16 KiB in bfloat16, of 4 layers that keep all\n"
            "KV windows   451.5 MiB a request at most, in 28 layers that see 4,096 tokens\n",
        ),
    ):
        family, settings, *_ = WINDOWED[name]
        made = getattr(transformers, f"{family}Config")
        made(**settings, architectures=[f"{family.removesuffix('Text')}ForCausalLM"]).save_pretrained(tmp_path)
        assert main(DescribeConfig(model=str(tmp_path), kv_windows="free")) == 0
        assert said in capsys.readouterr().out


def test_people_are_told_of_every_region_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, settings = PUBLISHED["DeepSeek-V3.2"]
    getattr(transformers, f"{family}Config")(**settings, architectures=[f"{family}ForCausalLM"]).save_pretrained(
        tmp_path
    )
    assert main(DescribeConfig(model=str(tmp_path), tp=8)) == 0
    told = capsys.readouterr().out
    assert "KV           latents of 61 layers, one head of 576\n" in told
    assert "KV           index keys of 61 layers, one head of 128\n" in told


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_cache_dtype": "int3"}, "--kv-cache-dtype must be one of"),
        ({"gpu_gib": 0}, "--gpu-gib"),
        ({"gpu_gib": math.inf}, "--gpu-gib"),
        ({"tp": 0}, "--tp"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DescribeConfig(model="model", **values).validate()


def test_the_small_model_has_a_name(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "fetch", lambda progress: tiny_folder)
    assert described(Path("SmolLM2"), capsys) == described(tiny_folder, capsys)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give 'smollm2', a folder with config.json, that file, or a GGUF file"):
        main(DescribeConfig(model=str(tmp_path)))


def test_people_are_told_which_group_of_nodes_is_the_smallest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Glm4MoeConfig(**PUBLISHED["GLM-4.5"][1], architectures=["Glm4MoeForCausalLM"])
    config.save_pretrained(tmp_path)
    found = described(tmp_path, capsys, tp=8, gpus_per_node=8)
    assert (found["nodes"], found["smallest_tp"]) == (1, 16)
    assert described(tmp_path, capsys, tp=16, gpus_per_node=8, gpu_gib=141.0)["smallest_tp"] == 8
    assert main(DescribeConfig(model=str(tmp_path), tp=16, gpus_per_node=8)) == 0
    words = "16 GPUs on 2 nodes; the smallest for a request of the whole context: --tp 16 --nnodes 2"
    assert words in capsys.readouterr().out
    assert "nodes" not in described(tmp_path, capsys, tp=16)
    with pytest.raises(ConfigError, match="--tp 12 is no multiple of --gpus-per-node 8"):
        DescribeConfig(model=str(tmp_path), tp=12, gpus_per_node=8).validate()


@pytest.mark.parametrize(("pp", "tp", "tied"), [(3, 1, False), (2, 2, True)])
def test_of_stages_is_told_what_each_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pp: int, tp: int, tied: bool
) -> None:
    """As much as its ranks read of the model's files."""
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], num_hidden_layers=32, num_key_value_heads=8, tie_word_embeddings=tied
    ).save_pretrained(tmp_path)
    model, found = read(tmp_path), described(tmp_path, capsys, tp=tp, pp=pp)
    cuts = stage_layers(model, pp)
    weights = [read_nbytes(model, Shard(0, tp, layers=layers)) for layers in cuts]
    token = 2 * 8 // tp * 128 * 2  # bytes of keys and values of a layer
    assert found["stages"] == [
        {"layers": len(layers), "weights_bytes": nbytes, "kv_token_bytes": len(layers) * token}
        for layers, nbytes in zip(cuts, weights, strict=True)
    ]
    most = max(map(len, cuts))
    room = int(80 * 0.9 * 2**30) - max(weights)
    assert found["gpu"] == {
        **{"weights_bytes": max(weights), "page_bytes": 16 * most * token},
        "pages": room // (16 * most * token),
    }
    assert "stages" not in described(tmp_path, capsys, tp=tp)


def read_nbytes(model: ModelConfig, shard: Shard) -> int:
    """Return what a rank takes of a checkpoint, in two bytes a number."""
    cuts = (cut for _, cuts in shard.placement(model, placement_of) for cut in cuts)
    return sum(2 * math.prod(cut.local.shape) for cut in cuts)


def test_people_are_told_of_stages_and_of_nodes_that_hold_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=131072).save_pretrained(
        tmp_path
    )
    assert main(DescribeConfig(model=str(tmp_path), pp=2, gpus_per_node=8, gpu_gib=24.0)) == 0
    told = capsys.readouterr().out
    assert "2 GPUs       of 24 GiB, each: weights 6.276 GiB in bfloat16, at most" in told
    assert "stage 0      layers 0 to 15, a GPU: weights 6.276 GiB, KV 256 KiB a token" in told
    assert "stage 1      layers 16 to 31, a GPU: weights 6.276 GiB, KV 256 KiB a token" in told
    assert "2 GPUs on one node; the smallest for a request of the whole context: --tp 2 --pp 2" in told
    assert main(DescribeConfig(model=str(tmp_path), pp=2, gpus_per_node=1, gpu_gib=48.0)) == 0
    assert "2 GPUs on 2 nodes; the smallest for a request of the whole context: --tp 1 --pp 2 --nnodes 2" in (
        capsys.readouterr().out
    )
    refused: list[tuple[dict[str, Any], str]] = [
        ({"pp": 12, "gpus_per_node": 8}, "--tp 1 times --pp 12 is no multiple of --gpus-per-node 8"),
        ({"pp": 2, "dp_attention": 2}, "--pp is not for --dp-attention"),
        ({"pp": 0}, "--tp, --pp, --dp-attention and --page-size must be at least 1"),
    ]
    for values, words in refused:
        with pytest.raises(ConfigError, match=words):
            DescribeConfig(model=str(tmp_path), **values).validate()
    with pytest.raises(ConfigError, match="--pp 33 is more than the 32 layers"):
        main(DescribeConfig(model=str(tmp_path), pp=33))
