"""FP8 on GPUs, in the interpreter where there is none: kept as stored, or made so, and close to what CPUs compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from diptych.architectures.size import LINEAR
from diptych.checkpoints.quantization.weight import as_floats
from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.models.matrices.dense import CPU
from diptych.engine.models.matrices.weights import load
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode

PROMPT_LEN = 5
TOKENS = np.random.default_rng(0).integers(0, 96, PROMPT_LEN + 1)  # a prompt, and what follows it
ERROR = 0.1  # of logits, by their norms: states lose up to 1/16 of each number


def matrices(folder: Path, device: torch.device, to_narrow: Any = None) -> dict[str, type[Any]]:
    """Return how the matrices of a layer are kept."""
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps

    part = ModelPart.of(open_model(str(folder)), None)
    ops = GpuOps(torch.float32, device, to_narrow)
    weights = load(part.config, part.placement, part.tensors, ops, torch.float32, device)
    return {name: type(weights.matrix(name)) for name in ("0.qkv", "0.o", "1.gate_up", "1.down", "lm_head", "embed")}


def logits(folder: Path, backend: str, quantization: str, device: torch.device = CPU) -> Tensor:
    """Return the logits after the prompt, and after the token that follows it, `[2, vocab_size]`."""
    source = open_model(str(folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=2, page_size=16, dtype="float32")
    kv = torch.zeros(layout.shape, device=device)
    runner = ModelRunner(source, kv, dtype="float32", quantization=quantization, attention_backend=backend)
    lens = (PROMPT_LEN, *([1] * (len(TOKENS) - PROMPT_LEN)))
    return torch.cat([runner.logits(batch(end - new, end)) for new, end in zip(lens, np.cumsum(lens), strict=True)])


def batch(start: int, end: int) -> ForwardBatch:
    places = np.arange(start, end)
    return ForwardBatch(
        mode=ForwardMode.DECODE if start else ForwardMode.EXTEND,
        input_ids=TOKENS[start:end],
        positions=places,
        out_slots=places,
        page_table=np.arange(2, dtype=np.int32)[None],
        seq_lens=np.array([end]),
        extend_lens=np.array([end - start]),
        num_sampled=np.ones(1, np.int64),
    )


def assert_close_but_quantised(found: Tensor, expected: Tensor) -> None:
    errors = (found.cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < ERROR, errors
    assert errors.min() > ERROR / 1000, errors


def test_weights_stay_fp8_and_logits_are_close_to_those_of_cpus(fp8_folder: Path, device: torch.device) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuMatrix
    from diptych.engine.models.matrices.gpu_fp8 import Fp8Kept
    from diptych.engine.models.matrices.gpu_quantized import StackedMatrix

    has_blocks = "weight_block_size" in json.loads((fp8_folder / "config.json").read_text())["quantization_config"]
    expected = dict.fromkeys(("0.o", "1.gate_up", "1.down"), Fp8Kept) | dict.fromkeys(("lm_head", "embed"), GpuMatrix)
    assert matrices(fp8_folder, device) == expected | {"0.qkv": StackedMatrix if has_blocks else Fp8Kept}
    on_cpu = logits(fp8_folder, "cpu", "auto")
    assert_close_but_quantised(logits(fp8_folder, "triton", "auto", device), on_cpu)
    torch.testing.assert_close(logits(fp8_folder, "triton", "none", device).cpu(), on_cpu, rtol=1e-3, atol=1e-3)


@pytest.fixture
def folder(fp8_folder: Path) -> Path:
    """The same model in bfloat16."""
    values = dict(open_model(str(fp8_folder)).tensors())
    plain = {name: torch.from_numpy(as_floats(tensor)).bfloat16() for name, tensor in values.items()}
    config = json.loads((fp8_folder / "config.json").read_text())
    (fp8_folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    safetensors.torch.save_file(plain, fp8_folder / "model.safetensors")
    return fp8_folder


@pytest.mark.parametrize("fp8_folder", ["row"], indirect=True)
def test_weights_are_made_fp8_but_for_those_of_tokens(folder: Path, device: torch.device) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuMatrix
    from diptych.engine.models.matrices.gpu_fp8 import Fp8Kept

    kept = matrices(folder, device, LINEAR)
    assert {name for name, kind in kept.items() if kind is Fp8Kept} == {"0.qkv", "0.o", "1.gate_up", "1.down"}
    assert {name for name, kind in kept.items() if kind is GpuMatrix} == {"lm_head", "embed"}
    assert_close_but_quantised(logits(folder, "triton", "fp8", device), logits(folder, "cpu", "auto"))


@pytest.mark.parametrize("fp8_folder", ["row"], indirect=True)
def test_cpus_make_no_weights_fp8(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 is for GPUs"):
        logits(folder, "cpu", "fp8")


@pytest.mark.parametrize("checkpoint", ["fp8 block"], indirect=True)  # of 16 x 32
def test_what_no_kernel_keeps_is_expanded_and_named_once(
    checkpoint: tuple[Path, Any], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuMatrix

    assert set(matrices(checkpoint[0], device).values()) == {GpuMatrix}
    assert [record.getMessage() for record in caplog.records] == [
        "weights in fp8 are expanded to float32, no kernel keeps them: the first is 0.down, 32768 bytes instead of 9216"
    ]
