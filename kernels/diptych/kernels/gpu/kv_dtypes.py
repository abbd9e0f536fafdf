"""KV numbers as the integers that hold them, to and from float32, inside of Triton kernels.

Rule: narrowing rounds to the nearest, ties to even; FP8 saturates, the others become infinite. Done with integers, so
that every GPU and the interpreter give the same bits: Triton has FP8 on some GPUs only, and its interpreter truncates.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

DTYPE_NAMES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
}
BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes a number
FP8_LARGEST: Final = tl.constexpr(448.0)
FP8_NAN: Final = tl.constexpr(0x7F)
FP8_SMALLEST_NORMAL: Final = tl.constexpr(2.0**-6)
FP8_EXPONENT_SHIFT: Final = tl.constexpr((127 - 7) << 3)  # the biases differ
FP8_STEPS: Final = tl.constexpr(2.0**14)  # a float32 of this size has steps of 2^-9, as FP8 below its normal numbers
FP8_STEPS_BITS: Final = tl.constexpr((127 + 14) << 23)  # the same as an integer


@triton.jit
def widen(bits, DTYPE: tl.constexpr):
    """Return the float32 values of numbers of a dtype, exactly."""
    if DTYPE == "float32":
        return bits.to(tl.float32, bitcast=True)
    elif DTYPE == "bfloat16":
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = bits.to(tl.int32)
        magnitude = wide & 0x7F
        half = ((wide & 0x80) << 8 | magnitude << 7).to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where(magnitude == FP8_NAN, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """Return the numbers of a dtype that are nearest to float32 values."""
    if DTYPE == "float32":
        return values.to(tl.int32, bitcast=True)
    elif DTYPE == "float16":
        return values.to(tl.float16).to(tl.int16, bitcast=True)
    elif DTYPE == "bfloat16":
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return tl.where(values == values, rounded, bits >> 16 | 0x40).to(tl.int16)
    else:
        return _narrow_fp8(values)


@triton.jit
def _narrow_fp8(values):
    sign = values.to(tl.int32, bitcast=True) >> 24 & 0x80
    magnitude = tl.minimum(tl.abs(values), FP8_LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - FP8_EXPONENT_SHIFT
    subnormal = (magnitude + FP8_STEPS).to(tl.int32, bitcast=True) - FP8_STEPS_BITS
    known = tl.where(magnitude < FP8_SMALLEST_NORMAL, subnormal, normal)
    return (sign | tl.where(values == values, known, FP8_NAN)).to(tl.int8)
