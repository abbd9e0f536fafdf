"""Models that keep latents: from folders of FP8 in blocks, and over narrow pools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from diptych.checkpoints.source import open_model

NewDriver = Callable[..., Any]
BLOCK = 32
TEXTS = {0: list(range(40, 79)), 1: [7] * 21, 2: [5]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The widths that a head keeps, 32 + 16, are no multiple of a block, as DeepSeek V3's are none."""
    config = transformers.DeepseekV3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "plain"
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_weights_of_fp8_in_blocks_are_computed_as_what_they_stand_for(
    folder: Path, new_driver: NewDriver, on_ranks: Callable[..., Any]
) -> None:
    quantized, widened = (_copied(folder, folder.with_name(name)) for name in ("quantized", "widened"))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    stored, values = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], values[name] = _in_blocks(weight)
    safetensors.torch.save_file(stored, quantized / "model.safetensors")
    safetensors.torch.save_file(values, widened / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    exact = new_driver(open_model(str(widened))).extend(TEXTS)
    for backend in ("cpu", "torch"):
        torch.testing.assert_close(
            new_driver(open_model(str(quantized)), backend).extend(TEXTS), exact, atol=1e-3, rtol=1e-4
        )
    source = open_model(str(quantized))
    together = on_ranks(2, lambda each: new_driver(source, "cpu", communicator=each).extend(TEXTS))
    torch.testing.assert_close(together, exact, atol=1e-3, rtol=1e-4)


def _copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and values. The last blocks may be smaller."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_narrow_pools_are_read_alike_and_near_the_exact_one(folder: Path, new_driver: NewDriver, kv_dtype: str) -> None:
    source = open_model(str(folder))
    exact = new_driver(source).extend(TEXTS)
    found = [new_driver(source, backend, kv_dtype=kv_dtype) for backend in ("cpu", "torch")]
    first, second = (driver.extend(TEXTS) for driver in found)
    torch.testing.assert_close(first, second, atol=1e-3, rtol=1e-3)
    assert not torch.equal(first, exact)
    assert torch.cosine_similarity(first, exact).min() > 0.98
    decoded = [driver.decode({0: 3, 1: 5, 2: 9}) for driver in found]
    torch.testing.assert_close(*decoded, atol=1e-3, rtol=1e-3)
