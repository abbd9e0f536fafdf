"""AWQ as AutoAWQ writes it (`version: gemm`): `qweight` and `qzeros`, eight 4-bit codes a word along the outputs.

Within a word the outputs are interleaved: its fields hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diptych.checkpoints.quantization.scheme import Scheme, around_zero, unpack_columns
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray

FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(config: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config`."""
    if config.get("bits", config.get("w_bit", 4)) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise ConfigError("AWQ checkpoints of 4 bits and version 'gemm' are supported")
    return Scheme(key="qweight", suffixes=("qweight", "qzeros", "scales"), build=_build)


def _build(parts: Mapping[str, Array]) -> QuantizedArray:
    codes, zeros = _outputs_first(parts["qweight"]), _outputs_first(parts["qzeros"])
    return around_zero(codes, zeros, parts["scales"].T, 4, codes.shape[1] // zeros.shape[1])


def _outputs_first(words: Array) -> Array:
    """`[inputs, outputs / 8]` words -> `[outputs, inputs]` codes."""
    fields = unpack_columns(words, 4).reshape(len(words), -1, 8)
    return np.ascontiguousarray(fields[:, :, FIELD_OF_OUTPUT].reshape(len(words), -1).T)
