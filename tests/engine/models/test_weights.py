"""Where a checkpoint's tensors go, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig, Rope
from diptych.engine.loader.gguf import Array
from diptych.engine.models.ops import TorchMatrix, TorchOps
from diptych.engine.models.placement import Split, llama
from diptych.engine.models.weights import Weights, load

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
    rope=Rope(1e4, 2),
    context_len=8,
    tie_embeddings=False,
    bos_id=None,
    eos_ids=(),
)


class RecordingOps(TorchOps):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[torch.Tensor, Split]] = {}

    def matrix(self, name: str, weight: torch.Tensor, split: Split) -> TorchMatrix:
        self.made[name] = weight, split
        return TorchMatrix(weight)


def checkpoint(dtype: Any = np.float32) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(piece.shape).astype(dtype) for name, (piece,) in llama(CONFIG)}


def read(
    tensors: dict[str, Array], config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> tuple[Weights, RecordingOps]:
    ops = RecordingOps()
    return load(config, llama(config), tensors.items(), ops, dtype), ops


def test_projections_that_read_the_same_input_become_one_matrix() -> None:
    tensors = checkpoint()
    weights, ops = read(tensors)
    prefix = "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(ops.made["1.qkv"][0], np.concatenate(qkv))
    np.testing.assert_array_equal(ops.made["1.gate_up"][0], np.concatenate(gate_up))
    np.testing.assert_array_equal(ops.made["lm_head"][0], tensors["lm_head.weight"])
    np.testing.assert_array_equal(weights.norm("1.ffn_norm"), tensors[f"{prefix}post_attention_layernorm.weight"])


def test_every_matrix_comes_with_its_name_and_how_ranks_divide_it() -> None:
    splits = {name: split for name, (_, split) in read(checkpoint())[1].made.items()}
    layer = {"qkv": Split.ROWS, "o": Split.COLUMNS, "gate_up": Split.ROWS, "down": Split.COLUMNS}
    expected = {f"{i}.{name}": split for i in range(2) for name, split in layer.items()}
    assert splits == {"embed": Split.ROWS, "lm_head": Split.ROWS} | expected


def test_biases_of_projections_that_are_one_matrix_are_one_vector() -> None:
    config = replace(CONFIG, qkv_bias=True)
    biases = {f"model.layers.{i}.self_attn.{name}_proj.bias": b for i in range(2) for name, b in bias_of_each().items()}
    weights, _ = read(checkpoint() | biases, config)
    np.testing.assert_array_equal(weights.vector("0.qkv_bias"), np.concatenate(list(bias_of_each().values())))


def bias_of_each() -> dict[str, Array]:
    return {"q": np.arange(4, dtype=np.float32), "k": np.ones(2, np.float32), "v": np.full(2, 7, np.float32)}


def test_a_norm_with_an_offset_is_kept_in_float32() -> None:
    tensors = checkpoint()
    weights, _ = read(tensors, replace(CONFIG, norm_offset=1.0), torch.bfloat16)
    rounded = torch.from_numpy(tensors["model.norm.weight"]).bfloat16().float()
    torch.testing.assert_close(weights.norm("norm"), rounded + 1, rtol=0, atol=0)


def test_bfloat16_bits_and_float16_become_the_dtype_asked_for() -> None:
    half = checkpoint(np.float16)
    as_bits = {name: (a.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, a in half.items()}
    from_half, from_bits = read(half)[1].made, read(as_bits)[1].made
    for name, (tensor, _) in from_half.items():
        torch.testing.assert_close(from_bits[name][0], tensor, rtol=1e-2, atol=0)
    assert read(half, dtype=torch.bfloat16)[1].made["0.o"][0].dtype == torch.bfloat16


def test_a_missing_tensor_is_named() -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        read(tensors)


def test_an_unknown_tensor_is_named() -> None:
    tensors = checkpoint() | {"model.layers.0.self_attn.q_norm.weight": np.ones(2, np.float32)}
    with pytest.raises(ConfigError, match="q_norm"):
        read(tensors)


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    tensors = checkpoint() | {"model.norm.weight": np.ones(9, np.float32)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \(9,\), the configuration says \(4,\)"):
        read(tensors)
