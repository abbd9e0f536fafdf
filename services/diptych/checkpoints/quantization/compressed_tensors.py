"""compressed-tensors: one group of weights in 4 or 8 bits, packed or not, or in FP8.

Packed codes lie along the inputs, around the middle: https://github.com/neuralmagic/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diptych.checkpoints.quantization.float8 import float8
from diptych.checkpoints.quantization.scheme import Scheme, around_zero, narrow, unpack_columns
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray


def compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config`."""
    weights = [group["weights"] for group in config["config_groups"].values()]
    if len(weights) != 1 or config.get("sparsity_config") not in (None, {}):
        raise ConfigError("compressed-tensors with one group of weights, not sparse, are supported")
    if not weights[0].get("symmetric", True):
        raise ConfigError("compressed-tensors with symmetric weights are supported")
    if config["format"] == "float-quantized":
        return float8({"weight_block_size": weights[0].get("block_structure")})
    if config["format"] == "int-quantized":
        return Scheme("weight_scale", ("weight", "weight_scale"), _plain, ignored=("input_scale", "input_zero_point"))
    if config["format"] == "pack-quantized":
        return _packed(weights[0]["num_bits"])
    raise ConfigError(f"compressed-tensors format {config['format']!r} is not supported")


def _plain(parts: Mapping[str, Array]) -> QuantizedArray:
    codes = parts["weight"]
    scales = np.broadcast_to(parts["weight_scale"].reshape(-1, 1), (len(codes), 1))
    return QuantizedArray("int8", codes, narrow(np.ascontiguousarray(scales)))


def _packed(bits: int) -> Scheme:
    if bits not in (4, 8):
        raise ConfigError(f"compressed-tensors of 4 and 8 bits are supported, not of {bits}")

    def build(parts: Mapping[str, Array]) -> QuantizedArray:
        if "weight_g_idx" in parts:
            raise ConfigError("compressed-tensors with activation ordering are not supported")
        scales, num_columns = parts["weight_scale"], int(parts["weight_shape"][1])
        codes = unpack_columns(parts["weight_packed"], bits)[:, :num_columns]
        zeros = np.full(scales.shape, 1 << (bits - 1), np.int16)
        return around_zero(codes, zeros, scales, bits, num_columns // scales.shape[1])

    return Scheme("weight_packed", ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx"), build)
