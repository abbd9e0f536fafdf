"""FP8 (e4m3) weights with scales: one a tensor, one a row, or one a block of 128 x 128.

`weight` and `weight_scale` (compressed-tensors, FBGEMM) or `weight_scale_inv` (blocks; it is multiplied with, too, see
https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md). Scales of activations are not used: CPUs
leave those in float32, GPUs quantise each token by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diptych.checkpoints.quantization.scheme import Scheme
from diptych.checkpoints.quantization.weight import as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray

NAN = 0x7F


def float8(config: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config`."""
    if config.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"FP8 weights in e4m3 are supported, not in {config['fmt']}")
    rows, columns = config.get("weight_block_size") or (0, 0)

    def build(parts: Mapping[str, Array]) -> QuantizedArray:
        scale = parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]
        return _with_scales(parts["weight"], as_floats(scale), rows, columns)

    suffixes = ("weight", "weight_scale", "weight_scale_inv")
    return Scheme(key="weight_scale", suffixes=suffixes, build=build, ignored=("input_scale", "activation_scale"))


def stores_fp8(config: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` says that weights are in FP8."""
    is_plain = config.get("quant_method") in ("fp8", "fbgemm_fp8")
    return is_plain or (config.get("quant_method"), config.get("format")) == ("compressed-tensors", "float-quantized")


def _with_scales(codes: Array, scales: Array, block_rows: int, block_columns: int) -> QuantizedArray:
    if (codes & NAN == NAN).any():
        raise ConfigError("an FP8 weight holds NaN")
    if scales.ndim == 2 and block_rows:
        rows = np.repeat(scales, block_rows, axis=0)[: len(codes)]
        return QuantizedArray("fp8", codes, rows, None, block_columns)
    return QuantizedArray("fp8", codes, np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, 1), (len(codes), 1))))
