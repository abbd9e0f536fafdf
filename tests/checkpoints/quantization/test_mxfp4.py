"""gpt-oss's experts in MXFP4: read to the values that transformers reads, and computed like a model of these values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from prompt_logits import prompt_logits
from torch import Tensor

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.quantization.weight import Stored, as_floats
from diptych.checkpoints.shard import Shard, cut_tensors
from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.models.matrices.weights import load
from diptych.engine.runner.model_part import ModelPart
from diptych.kernels.quantized import QuantizedArray

QUANTIZATION: Final = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
TINY: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path, TINY)


def write(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write a model in MXFP4, and the same numbers in floats, as transformers lays them out."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # imports Triton: not while tests are found

    torch.manual_seed(0)
    model: Any = transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed = dict(plain)
    for name in plain:
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_columns, num_rows = packed.pop(name).shape
            blocks = torch.randint(0, 256, (num_experts, num_rows, num_columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.config.save_pretrained(folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    return (
        _saved(folder / "packed", config | {"quantization_config": QUANTIZATION}, packed),
        _saved(folder / "plain", config, plain),
    )


def _saved(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_expert_has_the_values_that_transformers_reads(folders: tuple[Path, Path]) -> None:
    packed, plain = ({name: as_floats(each) for name, each in open_model(str(folder)).tensors()} for folder in folders)
    assert packed.keys() == plain.keys()
    for name, values in plain.items():
        np.testing.assert_array_equal(packed[name], values, err_msg=name)


def test_experts_stay_in_four_bits_until_they_are_laid_out(folders: tuple[Path, Path]) -> None:
    tensors = dict(open_model(str(folders[0])).tensors())
    down = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert isinstance(down, QuantizedArray)
    assert (down.code, down.group, down.shape, down.nbytes) == ("fp4", 32, (64, 96), 64 * 96 * 5 // 8)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_model_computes_what_its_dequantised_weights_would(folders: tuple[Path, Path], backend: str) -> None:
    packed, plain = (prompt_logits(folder, backend, "auto") for folder in folders)
    assert torch.equal(packed, plain)
    assert torch.equal(packed, prompt_logits(folders[0], backend, "none"))


def test_gpus_compute_the_same_without_expanding_experts(folders: tuple[Path, Path], device: torch.device) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps
    from diptych.engine.models.matrices.gpu_experts import PackedMatrix

    part = ModelPart.of(open_model(str(folders[0])), None)
    ops = GpuOps(torch.float32, device)
    weights = load(part.config, part.placement, part.tensors, ops, torch.float32, device)
    names = [f"{layer}.experts.{i}.{kind}" for layer in (0, 1) for i in range(4) for kind in ("gate_up", "down")]
    assert {type(weights.matrix(name)) for name in names} == {PackedMatrix}
    packed, plain = (prompt_logits(folder, "triton", "auto", device) for folder in folders)
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)


def cut(folder: Path, size: int) -> dict[str, Stored]:
    """Return what the second of so many ranks takes."""
    source = open_model(str(folder))
    placement = Shard(1, size).placement(source.config, FAMILIES[source.config.architecture].placement)
    return dict(cut_tensors(source.tensors(), placement))


def test_ranks_take_whole_groups_of_columns(tmp_path: Path) -> None:
    packed, plain = (cut(folder, 2) for folder in write(tmp_path, TINY | {"intermediate_size": 128}))
    down = packed["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert isinstance(down, QuantizedArray)
    assert down.shape == (64, 64)
    for name, values in plain.items():
        np.testing.assert_array_equal(as_floats(packed[name]), as_floats(values), err_msg=name)


def test_ranks_that_would_share_a_group_are_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="columns 48 to 96 of 96 divide a group of 32 that fp4 codes share"):
        cut(folders[0], 2)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(4, 8, 2, 8, dtype=torch.uint8), torch.zeros(4, 8, 2, dtype=torch.uint8), "do not fit each other"),
        (torch.zeros(4, 8, 2, 16, dtype=torch.uint8), torch.zeros(4, 8, 1, dtype=torch.uint8), "do not fit each other"),
        (torch.zeros(4, 8, 2, 16, dtype=torch.uint8), torch.zeros(4, 8, 2), "not uint8 and float32"),
        (torch.zeros(4, 8, 2, 16, dtype=torch.uint8), torch.full((4, 8, 2), 255, dtype=torch.uint8), "scale is NaN"),
        (torch.zeros(4, 8, 2, 16, dtype=torch.uint8), None, "lacks its 'scales'"),
    ],
)
def test_parts_that_make_no_sense_are_refused(
    folders: tuple[Path, Path], blocks: Tensor, scales: Tensor | None, message: str
) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    parts = {f"{name}_blocks": blocks} | ({} if scales is None else {f"{name}_scales": scales})
    safetensors.torch.save_file(parts, folders[0] / "model.safetensors")
    with pytest.raises(ConfigError, match=f"mlp.experts.down_proj.*{message}"):
        list(open_model(str(folders[0])).tensors())


@pytest.mark.parametrize("shape", [(3, 96, 64), (4, 96), (4,)])
def test_experts_that_are_too_few_or_no_matrices_are_refused(
    folders: tuple[Path, Path], shape: tuple[int, ...]
) -> None:
    tensors = {"model.layers.0.mlp.experts.down_proj": torch.zeros(shape)}
    safetensors.torch.save_file(tensors, folders[1] / "model.safetensors")
    with pytest.raises(ConfigError, match="not the tensors of 4 experts"):
        list(open_model(str(folders[1])).tensors())
