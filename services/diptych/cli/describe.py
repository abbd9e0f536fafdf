"""Say what a model needs before any GPU is rented: `diptych describe FOLDER`. Its config.json is enough."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import from_hf
from diptych.checkpoints.gguf_model import GgufModel
from diptych.checkpoints.hf_folder import quantization_of
from diptych.checkpoints.quantization.float8 import stores_fp8
from diptych.checkpoints.quantization.scheme import code_of
from diptych.checkpoints.shard import check_divides
from diptych.cli.reports.model_report import Plan, as_json, as_text
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError
from diptych.common.json_file import read_json
from diptych.engine.options.config import KV_WINDOWS, KvWindows, Quantization
from diptych.kernels.integer_layout import IntegerLayout, layout_of
from diptych.kernels.quantized import INT4_GROUPS, STRIP, QuantizedArray
from diptych.kvtransfer.layout import DTYPE_NBYTES

NO_BITS: Final = (0, 0)
GROUP: Final = 128  # columns of a scale, where AWQ and GPTQ do not say it


@dataclass(frozen=True, slots=True)
class DescribeConfig:
    """Print a model's parameters, the KV of a token, what fits GPUs, and what prompts cost on the wire.

    Weights need not be there, and nothing is computed: no GPU and no torch are needed.
    """

    model: str = argument(REQUIRED, help="a folder with config.json, a config.json, or a GGUF file")
    gpu_gib: float = option(80.0, help="memory of one GPU")
    gpu_memory_share: float = option(0.9, help="of it, as workers are given it")
    tp: int = option(1, help="GPUs of a worker")
    page_size: int = option(16, help="tokens a KV page")
    kv_cache_dtype: str = option("bfloat16", help="of keys and values: bfloat16 or fp8_e4m3, for example")
    quantization: Quantization = option("auto", help="of weights, as workers are given it: auto, none or fp8")
    kv_windows: KvWindows = option(
        KV_WINDOWS, help="KV behind the windows of layers that have some, as workers treat it"
    )
    json: bool = option(False, help="print JSON, for programs")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if self.kv_cache_dtype not in DTYPE_NBYTES:
            raise ConfigError(f"--kv-cache-dtype must be one of {', '.join(DTYPE_NBYTES)}, not {self.kv_cache_dtype!r}")
        if not 0 < self.gpu_gib < math.inf or not 0 < self.gpu_memory_share <= 1:
            raise ConfigError("--gpu-gib must be above 0, --gpu-memory-share above 0 and at most 1")
        if min(self.tp, self.page_size) < 1:
            raise ConfigError("--tp and --page-size must be at least 1")


def main(config: DescribeConfig) -> int:
    """Print the description; return the exit code."""
    path = Path(config.model).expanduser()
    model = replace(read(path), keeps_all=config.kv_windows == "keep")
    check_divides(model, config.tp)
    plan = Plan(
        config.gpu_gib,
        config.gpu_memory_share,
        config.tp,
        config.page_size,
        config.kv_cache_dtype,
        has_mxfp4=config.quantization != "none" and has_mxfp4(path),
        int4_group=None if config.quantization == "none" or model.moe is None else int4_group(path),
        integers=None if config.quantization == "none" else integers(path),
        integers_by_name={} if config.quantization == "none" else integers_by_name(path),
        has_fp8=config.quantization == "fp8" or (config.quantization == "auto" and has_fp8(path)),
    )
    print(json.dumps(as_json(model, plan), indent=2) if config.json else as_text(model, plan))
    return 0


def read(path: Path) -> ModelConfig:
    """Read a model's configuration. Raises `ConfigError` for what is not supported, or not there."""
    if path.suffix == ".gguf" and path.is_file():
        return GgufModel(path).config
    file = _config_file(path)
    if not file.is_file():
        raise ConfigError(f"no model {str(path)!r}: give a folder with config.json, that file, or a GGUF file")
    generation = file.with_name("generation_config.json")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return from_hf(read_json(file), read_json(generation) if generation.is_file() else {}, name)


def has_mxfp4(path: Path) -> bool:
    """Whether a model that `read` can read has its experts in MXFP4."""
    return bool(_quantization(path).get("quant_method") == "mxfp4")


def int4_group(path: Path) -> int | None:
    """Return the columns of a scale of experts in integers of four bits, 0 for all; None if GPUs keep none."""
    said = _quantization(path)
    bits, group = _bits_and_group(said)
    if said.get("desc_act") or not 0 < bits <= 4:
        return None
    return group if group in INT4_GROUPS or group % STRIP == 0 else None


def integers(path: Path) -> IntegerLayout | None:
    """Return how GPUs keep the matrices of layers but experts; None if they are not in integers, or not kept."""
    said = _quantization(path)
    bits, group = _bits_and_group(said)
    if said.get("desc_act") or not 0 < bits <= 8:
        return None
    method = said["quant_method"]
    has_mins = method == "awq" or (method == "gptq" and not said.get("sym"))
    has_half = method == "gptq" and not has_mins  # zero points and bfloat16 are kept in float32
    return IntegerLayout.of(code_of(bits), group, has_half_scales=has_half, has_mins=has_mins)


def integers_by_name(path: Path) -> dict[str, IntegerLayout]:
    """Return how GPUs keep each matrix of a GGUF file that is in integers."""
    if path.suffix != ".gguf":
        return {}
    arrays = ((name, block) for name, block in GgufModel(path).samples() if isinstance(block, QuantizedArray))
    layouts = ((name, layout_of(block)) for name, block in arrays)
    return {name: layout for name, layout in layouts if layout is not None}


def _bits_and_group(said: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bits of integers, and the columns of a scale, 0 for all; `NO_BITS` if there are no integers."""
    bits, group = said.get("bits", said.get("w_bit", 4)), said.get("group_size", said.get("q_group_size", GROUP))
    method, is_packed = said.get("quant_method"), said.get("format") == "pack-quantized"
    if method == "compressed-tensors" and (is_packed or said.get("format") == "int-quantized"):
        weights = next(iter(said["config_groups"].values()))["weights"]
        bits, group = weights["num_bits"], weights.get("group_size") if is_packed else None
    elif method not in ("awq", "gptq"):
        return NO_BITS
    return bits, max(0, group or 0)  # -1: all columns


def has_fp8(path: Path) -> bool:
    """Whether a model that `read` can read has its matrices in FP8."""
    return stores_fp8(_quantization(path))


def _quantization(path: Path) -> Mapping[str, Any]:
    return {} if path.suffix == ".gguf" else quantization_of(read_json(_config_file(path))) or {}


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path
