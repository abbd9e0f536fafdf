"""GGUF's block formats: `[num_rows, row_bytes]` bytes -> codes, scales and mins, or plain floats.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block holds 32 values, in the K formats 256
in sub-blocks of 16 or 32, whose scales are themselves products; these are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.kernels.quantized import Array, QuantizedArray

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How a tensor type is stored: `block_bytes` hold `block_values` values."""

    name: str
    block_values: int
    block_bytes: int
    unpack: Callable[[Bytes], Array | QuantizedArray]  # [num_rows, blocks of a row, block_bytes] -> [num_rows, ...]


def _plain(dtype: type) -> Callable[[Bytes], Array]:
    return lambda blocks: blocks.reshape(len(blocks), -1).view(dtype)


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `at` of each block: `[num_rows, num_blocks]`."""
    return blocks[..., at : at + 2].copy().view(np.float16)[..., 0]


def _wide(blocks: Bytes, at: int) -> Floats:
    """Like `_half`, ready to be multiplied with the scales of sub-blocks."""
    return _half(blocks, at).astype(np.float32)[..., None]


def _rows(values: Array) -> Array:
    return values.reshape(len(values), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """All low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _signed(codes: Array, offset: int) -> npt.NDArray[np.int8]:
    return _rows(codes).astype(np.int8) - np.int8(offset)


def _bits(packed: Bytes, count: int, width: int) -> Bytes:
    """Fields of `width` bits: `[..., num_bytes]` -> `[..., count, num_bytes]`, the lowest first."""
    shifts = np.arange(0, count * width, width, dtype=np.uint8)[:, None]
    fields = packed[..., None, :] >> shifts
    fields &= np.uint8((1 << width) - 1)
    return fields


def _q4_0(blocks: Bytes) -> QuantizedArray:
    return QuantizedArray("int4", _signed(_nibbles(blocks[..., 2:]), 8), _half(blocks, 0), None, 32)


def _q4_1(blocks: Bytes) -> QuantizedArray:
    return QuantizedArray("int4", _rows(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2), 32)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits, one a value: the fifth of its code."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> QuantizedArray:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return QuantizedArray("int8", _signed(codes, 16), _half(blocks, 0), None, 32)


def _q5_1(blocks: Bytes) -> QuantizedArray:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return QuantizedArray("int8", _rows(codes), _half(blocks, 0), _half(blocks, 2), 32)


def _q8_0(blocks: Bytes) -> QuantizedArray:
    return QuantizedArray("int8", _rows(blocks[..., 2:].view(np.int8)), _half(blocks, 0), None, 32)


def _q2_k(blocks: Bytes) -> QuantizedArray:
    factors, quarters = blocks[..., :16], blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32)
    scales, mins = _wide(blocks, 80) * (factors & 15), -_wide(blocks, 82) * (factors >> 4)
    return QuantizedArray("int4", _rows(_bits(quarters, 4, 2)), _rows(scales), _rows(mins), 16)


def _q3_k(blocks: Bytes) -> QuantizedArray:
    """Codes of two bits and one, which is set where 4 need not be subtracted; scales of four bits and two, less 32."""
    high = _bits(blocks[..., :32], 8, 1).reshape(*blocks.shape[:2], 2, 4, 32)
    codes = _bits(blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 32), 4, 2) | high << 2
    low = _nibbles(blocks[..., 96:104])
    top = _bits(blocks[..., 104:108], 4, 2).reshape(low.shape)
    scales = _wide(blocks, 108) * ((low | top << 4).astype(np.int8) - np.int8(32))
    return QuantizedArray("int4", _signed(codes, 4), _rows(scales), None, 16)


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: eight scales and mins of six bits in twelve bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return _rows(_wide(blocks, 0) * scales), _rows(-_wide(blocks, 2) * mins)


def _q4_k(blocks: Bytes) -> QuantizedArray:
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return QuantizedArray("int4", _rows(codes), *_scales_and_mins(blocks), 32)


def _q5_k(blocks: Bytes) -> QuantizedArray:
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    high = _bits(blocks[..., 16:48], 8, 1).reshape(low.shape)
    return QuantizedArray("int8", _rows(low | high << 4), *_scales_and_mins(blocks), 32)


def _q6_k(blocks: Bytes) -> QuantizedArray:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), 4, 2).reshape(low.shape)
    scales = _wide(blocks, 208) * blocks[..., 192:208].view(np.int8)
    return QuantizedArray("int8", _signed(low | high << 4, 32), _rows(scales), None, 16)


TYPES: Final = {
    0: GgmlType("F32", 1, 4, _plain(np.float32)),
    1: GgmlType("F16", 1, 2, _plain(np.float16)),
    2: GgmlType("Q4_0", 32, 18, _q4_0),
    3: GgmlType("Q4_1", 32, 20, _q4_1),
    6: GgmlType("Q5_0", 32, 22, _q5_0),
    7: GgmlType("Q5_1", 32, 24, _q5_1),
    8: GgmlType("Q8_0", 32, 34, _q8_0),
    10: GgmlType("Q2_K", 256, 84, _q2_k),
    11: GgmlType("Q3_K", 256, 110, _q3_k),
    12: GgmlType("Q4_K", 256, 144, _q4_k),
    13: GgmlType("Q5_K", 256, 176, _q5_k),
    14: GgmlType("Q6_K", 256, 210, _q6_k),
    30: GgmlType("BF16", 1, 2, _plain(np.uint16)),
}
