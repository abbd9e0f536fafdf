"""GPTQ as AutoGPTQ and GPTQModel write it: `qweight` packed along the inputs, `qzeros` along the outputs.

`checkpoint_format` "gptq" stores zero points less one, "gptq_v2" as they are. With `sym` the zero point is the middle,
whatever was stored: some writers mix the two formats up. https://github.com/AutoGPTQ/AutoGPTQ/pull/640
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diptych.checkpoints.quantization.scheme import Scheme, around_zero, unpack_columns
from diptych.checkpoints.quantization.weight import Stored, as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array

logger = logging.getLogger(__name__)


def gptq(config: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config`."""
    bits = config["bits"]
    if bits not in (2, 4, 8):
        raise ConfigError(f"GPTQ checkpoints of 2, 4 and 8 bits are supported, not of {bits}")
    if config.get("desc_act"):
        logger.warning("desc_act: columns of a group are not neighbours, so these weights are expanded to float32")
    stored_less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    build = _builder(bits, stored_less, is_symmetric=bool(config.get("sym")))
    return Scheme(key="qweight", suffixes=("qweight", "qzeros", "scales", "g_idx"), build=build)


def _builder(bits: int, stored_less: int, *, is_symmetric: bool) -> Callable[[Mapping[str, Array]], Stored]:
    def build(parts: Mapping[str, Array]) -> Stored:
        codes = unpack_columns(np.ascontiguousarray(parts["qweight"].T), bits)
        scales = np.ascontiguousarray(parts["scales"].T)
        zeros = unpack_columns(parts["qzeros"], bits).T[: len(codes)].astype(np.int16) + stored_less
        if is_symmetric:
            zeros = np.full(scales.shape, 1 << (bits - 1), np.int16)
        group = codes.shape[1] // scales.shape[1]
        columns = parts.get("g_idx", np.arange(codes.shape[1]) // group)
        if (columns == np.arange(codes.shape[1]) // group).all():
            return around_zero(codes, zeros, scales, bits, group)
        return (codes.astype(np.float32) - zeros[:, columns]) * as_floats(scales)[:, columns]

    return build
