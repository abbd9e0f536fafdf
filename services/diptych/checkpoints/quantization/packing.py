"""What the formats in safetensors files have in common: codes in 32-bit words, unsigned codes around a zero point."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.checkpoints.quantization.weight import as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import NIBBLES, Array, Code, QuantizedArray

WORD_BITS: Final = 32


def unpack_columns(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """`[rows, words]` -> `[rows, codes]`: the first code is in the lowest bits."""
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    fields = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(len(words), -1)


def around_zero(codes: Array, zeros: Array, scales: Array, bits: int, group: int) -> QuantizedArray:
    """`(code - zero) * scale`, all row by row: `[num_rows, num_columns]` and twice `[num_rows, num_groups]`."""
    code, middle = code_of(bits), 1 << (bits - 1)
    group = 0 if group == codes.shape[1] else group  # one group: columns may be cut anywhere
    if code == "int4" and (group % NIBBLES or codes.shape[1] % NIBBLES):
        raise ConfigError(f"{codes.shape[1]} columns in groups of {group}: both must be multiples of {NIBBLES}")
    if (zeros == middle).all():
        return QuantizedArray(code, (codes.astype(np.int16) - middle).astype(np.int8), narrow(scales), None, group)
    wide = as_floats(scales)
    return QuantizedArray(code, codes, wide, -wide * zeros.astype(np.float32), group)


def code_of(bits: int) -> Code:
    """Return the narrowest code that holds `bits`."""
    return "int4" if bits <= 4 else "int8"


def narrow(scales: Array) -> Array:
    """Keep float16 scales as they are; bfloat16 bits become float32."""
    return scales if scales.dtype == np.float16 else as_floats(scales)
