"""Writes quantised checkpoints the way the formats' documentation describes them, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from kernel_device import device
from torch import Tensor

__all__ = ["device"]

Parts = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Parts, Tensor]]  # a weight -> its parts in the file, and the values they stand for

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of a word holds this output
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SMALL_FP8 = {"hidden_size": 128, "head_dim": 32}  # keys and values have half a block each


def words(fields: list[Tensor], bits: int) -> Tensor:
    """Put `fields[i]` at bit `i * bits` of 32-bit words."""
    packed = sum(field.numpy().astype(np.int64) << (i * bits) for i, field in enumerate(fields))
    return torch.from_numpy(np.asarray(packed).astype(np.uint32).view(np.int32))


def pack_along_columns(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """`[rows, columns]` -> `[rows, columns * bits / 32]`."""
    per_word = 32 // bits
    return words([codes[:, i::per_word] for i in order or range(per_word)], bits)


def asymmetric(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, zero points and float16 scales `[out, groups]`."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
    return codes.flatten(1).int(), zeros.squeeze(2).int(), scales.squeeze(2)


def values(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    spread = zeros.repeat_interleave(GROUP, 1), scales.float().repeat_interleave(GROUP, 1)
    return (codes - spread[0]) * spread[1]


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    codes, zeros, scales = asymmetric(weight, 4)
    parts = {
        "qweight": pack_along_columns(codes.T, 4, AWQ_ORDER),
        "qzeros": pack_along_columns(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return parts, values(codes, zeros, scales)


def gptq(bits: int, *, symmetric: bool = False, offset: int = 1, act_order: bool = False) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        order = order if act_order else torch.arange(weight.shape[1])
        codes, zeros, scales = asymmetric(weight[:, order], bits)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        place = torch.argsort(order)  # of each column in the order of quantisation
        parts = {
            "qweight": pack_along_columns(codes[:, place], bits).T.contiguous(),
            "qzeros": pack_along_columns((zeros - offset).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": (place // GROUP).int(),
        }
        return parts, values(codes, zeros, scales)[:, place]

    return quantize


def float8(kind: str, name: str = "weight_scale") -> Quantize:
    """`kind`: one scale a "tensor", a "row", or a "block" of 16 x 32, or "large block" of 128 x 128 or less."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        large = min(rows, 128), min(columns, 128)
        block = {"tensor": (rows, columns), "row": (1, columns), "block": (16, 32), "large block": large}[kind]
        blocks = weight.view(rows // block[0], block[0], columns // block[1], block[1])
        scales = blocks.abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        stored = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": stored, name: scales[0, 0] if kind == "tensor" else scales}, stored.float() * spread

    return quantize


def int8_rows(weight: Tensor) -> tuple[Parts, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes * scales.float()


def packed_int4(weight: Tensor) -> tuple[Parts, Tensor]:
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales.float()[:, :, None]).round().clamp(-8, 7).int().flatten(1)
    parts = {
        "weight_packed": pack_along_columns(codes + 8, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, values(codes, torch.zeros_like(scales).int(), scales)


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq 4 bits": ({"quant_method": "gptq", "bits": 4}, gptq(4)),
    "gptq 2 bits": ({"quant_method": "gptq", "bits": 2}, gptq(2)),
    "gptq 8 bits": ({"quant_method": "gptq", "bits": 8}, gptq(8)),
    "gptq symmetric": ({"quant_method": "gptq", "bits": 4, "sym": True}, gptq(4, symmetric=True)),
    "gptq mislabelled": ({"quant_method": "gptq", "bits": 4, "sym": True}, gptq(4, symmetric=True, offset=0)),
    "gptq v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, offset=0)),
    "gptq act order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, act_order=True)),
    "fp8 tensor": ({"quant_method": "fp8"}, float8("tensor")),
    "fp8 row": ({"quant_method": "fbgemm_fp8"}, float8("row")),
    "fp8 block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]},
        float8("block", "weight_scale_inv"),
    ),
    "compressed fp8": (_compressed("float-quantized", num_bits=8, symmetric=True), float8("row")),
    "compressed int8": (_compressed("int-quantized", num_bits=8, symmetric=True), int8_rows),
    "compressed int4": (_compressed("pack-quantized", num_bits=4, symmetric=True), packed_int4),
}


EXPERT_FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq 4 bits": FORMATS["gptq 4 bits"],
    "fp8 row": FORMATS["fp8 row"],
    "fp8 large block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        float8("large block", "weight_scale_inv"),
    ),
}


def save(
    folder: Path, config: Mapping[str, Any], quantize: Quantize, settings: Mapping[str, Any] = TINY
) -> dict[str, Tensor]:
    """Write a tiny Llama with quantised projections; return the values of all its weights."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, tie_word_embeddings=False))
    return _write(folder, model.config, model.state_dict(), "_proj", config, quantize)


def save_experts(folder: Path, config: Mapping[str, Any], quantize: Quantize) -> dict[str, Tensor]:
    """The same of a tiny Qwen 3 MoE with quantised experts."""
    torch.manual_seed(0)
    sizes = TINY | {"num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
    model: Any = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**sizes, num_experts_per_tok=2, tie_word_embeddings=False)
    )
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        module, _, last = name.rpartition(".")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        for expert, stacked in enumerate(tensor if names else ()):
            parts = zip(names, stacked.chunk(len(names)), strict=True)
            weights |= {f"{module}.{expert}.{each}.weight": part for each, part in parts}
        weights |= {} if names else {name: tensor}
    return _write(folder, model.config, weights, ".experts.", config, quantize)


def _write(
    folder: Path,
    model: Any,  # its configuration
    weights: Mapping[str, Tensor],
    quantized: str,  # is in the names of what is quantised
    config: Mapping[str, Any],
    quantize: Quantize,
) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": dict(config)}))
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if quantized not in name:
            tensors[name] = expected[name] = weight.clone()
            continue
        parts, expected[name] = quantize(weight)
        tensors |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return expected


@pytest.fixture(params=EXPERT_FORMATS)
def experts_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with experts in each of the formats that GPUs keep."""
    folder = tmp_path / "experts"
    save_experts(folder, *EXPERT_FORMATS[request.param])
    return folder


@pytest.fixture(params=["row", "large block"])
def fp8_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model in FP8 as GPUs keep it."""
    block = {"weight_block_size": [128, 128]} if request.param == "large block" else {}
    config = {"quant_method": "fp8", "fmt": "e4m3", **block}
    save(tmp_path, config, float8(request.param, "weight_scale_inv"), TINY | SMALL_FP8)
    return tmp_path


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder in each of the formats, and the values of its weights."""
    config, quantize = FORMATS[request.param]
    folder = tmp_path / "quantized"
    return folder, save(folder, config, quantize)
