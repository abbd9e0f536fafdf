"""Where a checkpoint's tensors go, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_config import tiny_config

from diptych.architectures.config import ModelConfig, Rope
from diptych.architectures.placement import Split, llama
from diptych.checkpoints.quantization.weight import QuantizedWeight, Stored, as_floats
from diptych.common.errors import ConfigError
from diptych.engine.models.arithmetic.ops import TorchOps
from diptych.engine.models.matrices.matrix import TorchMatrix, Weight
from diptych.engine.models.matrices.weights import Weights, load
from diptych.kernels.quantized import Array, QuantizedArray

CONFIG = tiny_config(
    hidden_size=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    ffn_size=3,
    rope=Rope(1e4, 2),
    context_len=8,
    tie_embeddings=False,
)


class RecordingOps(TorchOps):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.made: dict[str, tuple[Weight, Split]] = {}

    def matrix(self, name: str, weight: Weight, split: Split) -> TorchMatrix:
        self.made[name] = weight, split
        return super().matrix(name, weight, split)


def checkpoint(dtype: Any = np.float32) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(piece.shape).astype(dtype) for name, (piece,) in llama(CONFIG)}


def read(
    tensors: Mapping[str, Stored], config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32
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


def test_matrices_of_two_bytes_a_weight_stay_so_and_vectors_become_the_dtype_asked_for() -> None:
    half = checkpoint(np.float16)
    weights, ops = read(half, dtype=torch.bfloat16)
    qkv = ops.made["1.qkv"][0]
    assert isinstance(qkv, QuantizedWeight)
    assert [part.code for part in qkv.parts] == ["float16"]
    q, k, v = (half[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(qkv.dequantize(), np.concatenate([q, k, v]).astype(np.float32))
    assert weights.norm("norm").dtype == torch.bfloat16


def test_pieces_of_different_formats_are_one_matrix_of_several_parts() -> None:
    tensors: dict[str, Stored] = {**checkpoint(np.float16)}
    name = "model.layers.0.self_attn.v_proj.weight"
    values = as_floats(tensors[name])
    tensors[name] = QuantizedArray("int8", np.ones(values.shape, np.int8), np.ones((len(values), 1), np.float32))
    qkv = read(tensors)[1].made["0.qkv"][0]
    assert isinstance(qkv, QuantizedWeight)
    assert [(part.code, len(part)) for part in qkv.parts] == [("float16", 6), ("int8", 2)]


def test_a_matrix_that_is_quantised_in_part_only_becomes_floats() -> None:
    tensors: dict[str, Stored] = {**checkpoint()}
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name] = as_floats(tensors[name]).astype(np.float16)
    gate_up = read(tensors)[1].made["0.gate_up"][0]
    assert isinstance(gate_up, torch.Tensor)
    np.testing.assert_array_equal(gate_up[:3], as_floats(tensors[name]))


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
