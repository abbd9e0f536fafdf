"""The casts of `page_pack.py` inside of Triton kernels, bit for bit. Numbers are the integers that hold them.

Done with integers, so that every GPU and the interpreter agree: Triton has FP8 on some GPUs only, and its interpreter
truncates.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

BF16_NAN: Final = tl.constexpr(0x7FC0)
FP8_LARGEST: Final = tl.constexpr(448.0)
FP8_LARGEST_BITS: Final = tl.constexpr(0x7E)
FP8_SMALLEST_NORMAL: Final = tl.constexpr(2.0**-6)
FP8_STEPS: Final = tl.constexpr(2.0**14)  # the last bit of a float32 of this size is worth 2^-9
FP8_STEPS_BITS: Final = tl.constexpr((127 + 14) << 23)
FP8_EXPONENTS: Final = tl.constexpr((127 - 7) << 23)  # the biases differ


@triton.jit
def widen(bits, DTYPE: tl.constexpr):
    """Return the float32 values of numbers of a dtype."""
    if DTYPE == "float32":
        return bits.to(tl.float32, bitcast=True)
    elif DTYPE == "bfloat16":
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = bits.to(tl.int32)
        half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0  # with its exponent where half precision has it, FP8 is 1/256


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
        return tl.where(values == values, rounded, BF16_NAN).to(tl.int16)  # a GPU's own NaN would be rounded up to zero
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = tl.abs(values)
        normal = ((bits & 0x7FFFFFFF) - FP8_EXPONENTS + 0x7FFFF + (bits >> 20 & 1)) >> 20
        subnormal = (magnitude + FP8_STEPS).to(tl.int32, bitcast=True) - FP8_STEPS_BITS
        rounded = tl.where(magnitude < FP8_SMALLEST_NORMAL, subnormal, normal)
        sign = tl.where(values == values, bits >> 24 & 0x80, 0)
        return (tl.where(magnitude < FP8_LARGEST, rounded, FP8_LARGEST_BITS) | sign).to(tl.int8)
