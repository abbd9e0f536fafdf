"""GGUF files of several architectures against transformers: names and row order by the rules of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.5, 2, 3, 4, 5, 6]}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20}),
    "gemma3": ("Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20}),
    "llama": ("Llama", {}),
    "phi3": ("Phi3", {"sliding_window": 30, "original_max_position_embeddings": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
TEXT = np.random.default_rng(0).integers(0, 200, 50).tolist()


def random_model(architecture: str, rope: dict[str, Any]) -> Any:
    name, settings = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, f"{'Gemma3Text' if name == 'Gemma3' else name}Config")(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters=rope,
        initializer_range=0.2,
        pad_token_id=0,
        **settings,
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def write(path: Path, architecture: str, model: Any) -> gguf.GGUFWriter:
    """Return the writer, to add metadata and `finish`."""
    writer, config = gguf.GGUFWriter(path, architecture), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if "head_dim" in ARCHITECTURES[architecture][1]:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if "sliding_window" in ARCHITECTURES[architecture][1]:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        stem, suffix = name.rsplit(".", 1)
        tensor = parameter.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = paired(tensor, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(tensor))
    return writer


def paired(weight: Any, num_heads: int) -> Any:
    """As `LlamaModel.permute` of llama.cpp's converter."""
    rows = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, rows, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(folder: Path, new_driver: Callable[..., Any], architecture: str, model: Any) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT])).logits[0, -1:]
    source = open_model(str(folder / "model.gguf"))
    assert source.config.architecture == {"gemma3": "gemma3_text"}.get(architecture, architecture)
    torch.testing.assert_close(new_driver(source).extend({0: TEXT}), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_has_the_logits_of_transformers(
    new_driver: Callable[..., Any], tmp_path: Path, architecture: str
) -> None:
    plain = {"rope_type": "default", "rope_theta": 5e4}
    rope = {"full_attention": plain, "sliding_attention": plain | {"rope_theta": 1e4}}
    model = random_model(architecture, rope if architecture == "gemma3" else plain)
    finish(write(tmp_path / "model.gguf", architecture, model))
    check(tmp_path, new_driver, architecture, model)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_yarn_is_read(new_driver: Callable[..., Any], tmp_path: Path, architecture: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e4}
    model = random_model(architecture, yarn)
    writer = write(tmp_path / "model.gguf", architecture, model)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    finish(writer)
    check(tmp_path, new_driver, architecture, model)


def test_the_factors_of_longrope_are_tensors_and_rotate_a_part_of_a_head(
    new_driver: Callable[..., Any], tmp_path: Path
) -> None:
    long = LONG | {"rope_theta": 5e4, "partial_rotary_factor": 0.75}
    model = random_model("phi3", long)
    writer = write(tmp_path / "model.gguf", "phi3", model)
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_orig_ctx_len(32)
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(long[f"{name}_factor"], np.float32))
    finish(writer)
    check(tmp_path, new_driver, "phi3", model)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.expert_count", 8, r"llama\.expert_count in the GGUF metadata is not supported"),
        ("llama.attention.sliding_window", 8, r"llama\.attention\.sliding_window"),
        ("llama.rope.dimension_count", 8, "of which fewer dimensions rotate"),
    ],
)
def test_metadata_without_a_meaning_here_is_refused_by_name(tmp_path: Path, key: str, value: int, named: str) -> None:
    writer = write(tmp_path / "model.gguf", "llama", random_model("llama", {"rope_type": "default", "rope_theta": 1e4}))
    writer.add_uint32(key, value)
    finish(writer)
    with pytest.raises(ConfigError, match=named):
        open_model(str(tmp_path / "model.gguf"))
