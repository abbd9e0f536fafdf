"""Where a checkpoint's tensors go, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.gguf import Array
from diptych.engine.models.llama_weights import load, placement

CONFIG = ModelConfig(
    model_id="tiny",
    architecture="llama",
    vocab_size=5,
    hidden_size=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    ffn_size=3,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    context_len=8,
    tie_embeddings=False,
    bos_id=None,
    eos_ids=(),
)


def checkpoint(dtype: Any = np.float32) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(piece.shape).astype(dtype) for name, piece in placement(CONFIG)}


def test_projections_that_read_the_same_input_become_one_matrix() -> None:
    tensors = checkpoint()
    weights = load(CONFIG, tensors.items(), torch.float32)
    prefix = "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(weights["1.qkv"], np.concatenate(qkv))
    np.testing.assert_array_equal(weights["1.gate_up"], np.concatenate(gate_up))
    np.testing.assert_array_equal(weights["lm_head"], tensors["lm_head.weight"])
    layer = {"input_norm", "qkv", "o", "ffn_norm", "gate_up", "down"}
    assert weights.keys() == {"embed", "norm", "lm_head"} | {f"{i}.{name}" for i in range(2) for name in layer}


def test_bfloat16_bits_and_float16_become_the_dtype_asked_for() -> None:
    half = checkpoint(np.float16)
    as_bits = {name: (a.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, a in half.items()}
    from_half, from_bits = (load(CONFIG, each.items(), torch.float32) for each in (half, as_bits))
    for name, tensor in from_half.items():
        torch.testing.assert_close(from_bits[name], tensor, rtol=1e-2, atol=0)
    assert load(CONFIG, half.items(), torch.bfloat16)["0.o"].dtype == torch.bfloat16


def test_a_missing_tensor_is_named() -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(CONFIG, tensors.items(), torch.float32)


def test_an_unknown_tensor_is_named() -> None:
    tensors = checkpoint() | {"model.layers.0.self_attn.q_norm.weight": np.ones(2, np.float32)}
    with pytest.raises(ConfigError, match="q_norm"):
        load(CONFIG, tensors.items(), torch.float32)


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    tensors = checkpoint() | {"model.norm.weight": np.ones(9, np.float32)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \(9,\), the configuration says \(4,\)"):
        load(CONFIG, tensors.items(), torch.float32)
