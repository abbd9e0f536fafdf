"""Codes in words become numbers, as tensor cores take them: exact in each type that states have.

That a code is put into the low bits of a number whose exponent makes them units is from FasterTransformer
(`interleaved_numeric_conversion.h`; Kim et al., 2022, "Who says elephants can't run").
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from diptych.kernels.gpu.layers.integer_matrix import code_of

# The numbers of two words: $0.. are the parts'. `(a & b) | c` is the table 0xEA of lop3. A bfloat16 of 128, or a
# float16 of 1024, has units as its lowest bits.
FOUR_BITS: Final = """{
    .reg .b32 t, m, z;
    mov.b32 m, MAGIC;
    mov.b32 z, ZERO;
    lop3.b32 $0, $4, 0x000F000F, m, 0xEA;
    sub.rn.TYPE $0, $0, z;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000F000F, m, 0xEA;
    sub.rn.TYPE $1, $1, z;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000F000F, m, 0xEA;
    sub.rn.TYPE $2, $2, z;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000F000F, m, 0xEA;
    sub.rn.TYPE $3, $3, z;
}"""
EIGHT_BITS: Final = """{
    .reg .b32 t, m, s;
    mov.b32 m, MAGIC;
    lop3.b32 $0, $2, 0x007F007F, m, 0xEA;
    lop3.b32 s, $2, 0x00800080, m, 0xEA;
    sub.rn.TYPE $0, $0, s;
    shr.u32 t, $2, 8;
    lop3.b32 $1, t, 0x007F007F, m, 0xEA;
    lop3.b32 s, t, 0x00800080, m, 0xEA;
    sub.rn.TYPE $1, $1, s;
}"""
BRAIN_MAGIC: Final = 0x43004300
HALF_MAGIC: Final = 0x64006400


def instructions(template: str, magic: int, zero: int, type_name: str) -> str:
    """Return PTX for words whose codes were stored with `zero` on top."""
    text = template.replace("MAGIC", hex(magic)).replace("ZERO", hex(magic | zero << 16 | zero))
    return text.replace("TYPE", type_name)


FOUR_TO_BFLOAT16: Final = tl.constexpr(instructions(FOUR_BITS, BRAIN_MAGIC, 0, "bf16x2"))
SIGNED_FOUR_TO_BFLOAT16: Final = tl.constexpr(instructions(FOUR_BITS, BRAIN_MAGIC, 8, "bf16x2"))
EIGHT_TO_BFLOAT16: Final = tl.constexpr(instructions(EIGHT_BITS, BRAIN_MAGIC, 0, "bf16x2"))
FOUR_TO_FLOAT16: Final = tl.constexpr(instructions(FOUR_BITS, HALF_MAGIC, 0, "f16x2"))
SIGNED_FOUR_TO_FLOAT16: Final = tl.constexpr(instructions(FOUR_BITS, HALF_MAGIC, 8, "f16x2"))
EIGHT_TO_FLOAT16: Final = tl.constexpr(instructions(EIGHT_BITS, HALF_MAGIC, 0, "f16x2"))


@triton.jit
def unpacked(bits, DTYPE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, COMPILED: tl.constexpr):
    """Return the codes of each part of words `[rows, PART]`, as numbers."""
    if not COMPILED or DTYPE.is_fp32():
        if BITS == 4:
            return (
                code_of(bits, 0, BITS, ZERO).to(DTYPE),
                code_of(bits, 1, BITS, ZERO).to(DTYPE),
                code_of(bits, 2, BITS, ZERO).to(DTYPE),
                code_of(bits, 3, BITS, ZERO).to(DTYPE),
            )
        else:
            return code_of(bits, 0, BITS, ZERO).to(DTYPE), code_of(bits, 1, BITS, ZERO).to(DTYPE)
    elif BITS == 8:
        return two_numbers(bits, EIGHT_TO_BFLOAT16 if DTYPE.is_bf16() else EIGHT_TO_FLOAT16, DTYPE)
    elif ZERO == 0:
        return four_numbers(bits, FOUR_TO_BFLOAT16 if DTYPE.is_bf16() else FOUR_TO_FLOAT16, DTYPE)
    else:
        return four_numbers(bits, SIGNED_FOUR_TO_BFLOAT16 if DTYPE.is_bf16() else SIGNED_FOUR_TO_FLOAT16, DTYPE)


@triton.jit
def two_numbers(bits, INSTRUCTIONS: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        INSTRUCTIONS, "=&r,=&r,r", [bits], dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=2
    )


@triton.jit
def four_numbers(bits, INSTRUCTIONS: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        INSTRUCTIONS,
        "=&r,=&r,=&r,=&r,r",
        [bits],
        dtype=(DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
        is_pure=True,
        pack=2,
    )
