"""Quantised safetensors: read to the values they stand for, and computed like a model of these values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from greedy_text import generate
from torch import Tensor

from diptych.checkpoints.hf_folder import read_scheme
from diptych.checkpoints.quantization.weight import as_floats
from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray

Checkpoint = tuple[Path, dict[str, Tensor]]


def test_every_weight_has_the_value_that_the_format_says(checkpoint: Checkpoint) -> None:
    folder, expected = checkpoint
    read = {name: torch.from_numpy(as_floats(tensor)) for name, tensor in open_model(str(folder)).tensors()}
    assert read.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(read[name], values, rtol=1e-6, atol=1e-7, msg=name)


def test_the_model_computes_what_its_dequantised_weights_would(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, expected = checkpoint
    dense = tmp_path / "dense"
    dense.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (dense / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(expected, dense / "model.safetensors")
    prompt = np.random.default_rng(0).integers(0, 96, 40).tolist()
    assert generate(folder, prompt) == generate(dense, prompt, "none") == generate(folder, prompt, "none")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "tiny: quant_method 'bitsandbytes' is not supported; awq, gptq"),
        ({"quant_method": "gptq", "bits": 3}, "not of 3"),
        ({"quant_method": "gptq"}, "quantization_config has no 'bits'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemm'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "not in e5m2"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scheme(config, "tiny")


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 8, dtype=torch.int32)}
    with pytest.raises(ConfigError, match=r"up_proj is quantised, but the checkpoint lacks its 'qzeros'"):
        list(open_folder(tmp_path, tensors, {"quant_method": "awq"}))


def test_codes_that_no_configuration_explains_are_refused(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.zeros(8, 8, dtype=torch.int8)}
    with pytest.raises(ConfigError, match=r"up_proj\.weight is quantised, but quantization_config does not say how"):
        list(open_folder(tmp_path, tensors, None))


def open_folder(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> Any:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return open_model(str(folder)).tensors()


def test_columns_are_taken_in_whole_groups() -> None:
    array = QuantizedArray("int4", np.arange(64, dtype=np.int8)[None] % 8, np.ones((1, 2), np.float16), None, 32)
    np.testing.assert_array_equal(array.columns(32, 64).dequantize(), array.dequantize()[:, 32:])
    with pytest.raises(ConfigError, match="columns 16 to 48 of 64 divide a group of 32"):
        array.columns(16, 48)
