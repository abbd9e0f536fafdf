"""MXFP4 as gpt-oss's checkpoints have it: `..._blocks` and `..._scales` of stacked experts.

A block is 16 bytes with 32 codes in FP4 (e2m1), the lower half of a byte first; its scale is a byte, the exponent of a
power of two (E8M0). OCP Microscaling Formats 1.0, section 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from diptych.checkpoints.quantization.scheme import Scheme
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import MXFP4_GROUP as GROUP
from diptych.kernels.quantized import Array, QuantizedArray

EXPONENT_BIAS: Final = 127
NAN: Final = 255


def mxfp4(config: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config`. What is not converted says so by its names, so that list is not needed."""
    return Scheme(key="blocks", suffixes=("blocks", "scales"), build=_build, separator="_", result="")


def _build(parts: Mapping[str, Array]) -> QuantizedArray:
    """Put experts on top of each other: `[num_experts, num_rows, num_groups, 16]` -> `[all rows, num_columns]`."""
    blocks, scales = parts["blocks"], parts["scales"]
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ConfigError(f"MXFP4 has bytes for blocks and scales, not {blocks.dtype} and {scales.dtype}")
    if blocks.ndim != 4 or blocks.shape[3] * 2 != GROUP or blocks.shape[:3] != scales.shape:
        raise ConfigError(f"MXFP4 blocks of {blocks.shape} and scales of {scales.shape} do not fit each other")
    if (scales == NAN).any():
        raise ConfigError("an MXFP4 scale is NaN")
    codes = np.empty((*scales.shape, GROUP), np.uint8)
    np.bitwise_and(blocks, 15, out=codes[..., 0::2])
    np.right_shift(blocks, 4, out=codes[..., 1::2])
    num_groups = scales.shape[2]
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - EXPONENT_BIAS)
    return QuantizedArray("fp4", codes.reshape(-1, num_groups * GROUP), factors.reshape(-1, num_groups), None, GROUP)
