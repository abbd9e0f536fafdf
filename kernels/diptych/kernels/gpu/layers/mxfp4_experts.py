"""Experts in MXFP4, multiplied by the tokens that chose them: four bits of each weight are read, none is expanded.

OCP Microscaling Formats 1.0: 32 columns of a row are codes of four bits (e2m1) with one scale, a power of two (e8m0).
A *strip* is 128 columns. Its rows lie behind each other, 64 bytes each: a tile of rows is one stretch of memory.
A word of 16 bits has the codes of four columns that are 32 apart, and a word of 32 bits the scales of these columns: so
each of the four has one scale a row. Three of them need a shift and a mask to become numbers: where their bits lie is
from triton_kernels (`layout_details/hopper_value.py`), the fields of a bfloat16, three bits apart. The fourth has what
is left. A multiplication of a pair of words puts it in place, and in that pair it is in the other column's word.

Rule: weights have the values of `QuantizedArray.dequantize`, rounded to the states' type once; products are added up in
float32 and in order of the strips; for a `block`, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.moe import (
    BLOCKS,
    BLOCKS_A_GROUP,
    VECTOR_NBYTES,
    AlignedExperts,
    addresses_of,
    check_grouped,
    place_of_program,
    roomy_block,
)
from diptych.kernels.quantized import MXFP4_GROUP as GROUP
from diptych.kernels.quantized import STRIP, QuantizedArray

PARTS: Final = STRIP // GROUP  # of a word
BIAS: Final = 126  # a code with its bits in a bfloat16 is so many powers of two too small: scales have them in them
LARGEST_EXPONENT: Final = 254 - BIAS  # of scales: a larger one with the bias would be infinite
MANTISSA: Final = 0x7FFFFF  # of a float32
SMALLEST: Final = 0x400000  # 2^-127, the scale with exponent 0

MXFP4_BLOCKS: Final = (8, *BLOCKS)  # tokens, which are the columns of a tile
TILES: Final = dict.fromkeys(MXFP4_BLOCKS, Tile(128, STRIP, 3, 4)) | dict.fromkeys((16, 32), Tile(128, STRIP, 4, 4))
TILES_OF_FEW: Final = (  # of the fewest tokens, and how many rows of weights they read at most: warps are short of work
    (32_000, Tile(64, STRIP, 5, 4)),
    (64_000, Tile(64, STRIP, 4, 2)),
)
WIDE_TILE: Final = Tile(32, STRIP, 2, 8)  # float32 is for comparisons

# What is made of two words: the bits of four numbers each, less the bias of their type, times $5 to $8. A product with
# a few powers of two puts the bits of the fourth in place: its copies of them do not overlap.
TO_BFLOAT16: Final = tl.constexpr("""{
    .reg .b32 t, u;
    and.b32 $0, $4, 0x81C081C0;
    mul.rn.bf16x2 $0, $0, $5;
    shl.b32 t, $4, 3;
    and.b32 $1, t, 0x81C081C0;
    mul.rn.bf16x2 $1, $1, $6;
    shf.l.wrap.b32 u, $4, $4, 6;
    and.b32 $2, u, 0x81C081C0;
    mul.rn.bf16x2 $2, $2, $7;
    and.b32 t, u, 0x001B001B;
    mul.lo.u32 t, t, 0x1084;
    and.b32 t, t, 0x81C081C0;
    mul.rn.bf16x2 $3, t, $8;
}""")
TO_FLOAT16: Final = tl.constexpr("""{
    .reg .b32 t, u, v;
    and.b32 t, $4, 0x80008000;
    shl.b32 u, $4, 3;
    and.b32 v, u, 0x0E000E00;
    or.b32 t, t, v;
    mul.rn.f16x2 $0, t, $5;
    and.b32 t, u, 0x80008000;
    shl.b32 u, $4, 6;
    and.b32 v, u, 0x0E000E00;
    or.b32 t, t, v;
    mul.rn.f16x2 $1, t, $6;
    shf.l.wrap.b32 u, $4, $4, 6;
    and.b32 t, u, 0x80008000;
    shl.b32 v, u, 3;
    and.b32 v, v, 0x0E000E00;
    or.b32 t, t, v;
    mul.rn.f16x2 $2, t, $7;
    and.b32 t, u, 0x00130013;
    mul.lo.u32 t, t, 0x0420;
    and.b32 t, t, 0x0E000E00;
    shl.b32 v, u, 12;
    and.b32 v, v, 0x80008000;
    or.b32 t, t, v;
    mul.rn.f16x2 $3, t, $8;
}""")
SWAP_BYTES: Final = tl.constexpr("prmt.b32 $0, $1, $1, 0x2301;")  # of each half


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A weight `[n, k]`; columns are filled up with zeros to whole strips."""

    words: Tensor  # int16 [num_strips, n, 32]: bits 15, 8-6; 12, 5-3; 9, 2-0 are three codes; 13, 11-10, 14 see above
    scales: Tensor  # int32 [num_strips, n]: bits 14-7; 30-23; 6-0, 15; 22-16, 31 are the four exponents, see `BIAS`
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1], self.k

    @property
    def group(self) -> int:
        """Columns of a scale."""
        return GROUP

    @staticmethod
    def of(array: QuantizedArray, device: torch.device) -> Mxfp4Matrix:
        """Lay out what `can_keep` is true of, in memory of `device`."""
        codes = torch.from_numpy(array.codes).to(device)
        return pack(codes, torch.from_numpy(exponents(array)).to(device))


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """One matrix of each expert, wherever they lie: nothing is copied."""

    SCRATCH: ClassVar = ("words", "scales")  # addresses in one process: no weights, see `engine.weights.memory`

    matrices: tuple[Mxfp4Matrix, ...]  # of one shape
    words: Tensor  # int64 [num_experts], addresses on the GPU
    scales: Tensor  # the same

    @staticmethod
    def of(matrices: Sequence[Mxfp4Matrix]) -> Mxfp4Experts:
        for matrix in matrices:
            assert matrix.shape == matrices[0].shape, (matrix.shape, matrices[0].shape)
        words, scales = ([getattr(matrix, name) for matrix in matrices] for name in ("words", "scales"))
        return Mxfp4Experts(tuple(matrices), addresses_of(words), addresses_of(scales))

    @property
    def shape(self) -> tuple[int, int]:
        """That of each matrix."""
        return self.matrices[0].shape

    @property
    def num_experts(self) -> int:
        return len(self.matrices)

    def block(self, num_assignments: int) -> int:
        """See `roomy_block`."""
        return roomy_block(num_assignments, self.num_experts, MXFP4_BLOCKS[0], MXFP4_BLOCKS[-1])

    def multiply(
        self, x: Tensor, aligned: AlignedExperts, chosen: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """See `grouped_mxfp4`, which knows from `aligned` what is `chosen`."""
        grouped_mxfp4(x, self, aligned, out, bias)


def can_keep(array: QuantizedArray) -> bool:
    """Whether a matrix is in this format, with scales as weights have them: up to 2."""
    if array.code != "fp4" or array.group != GROUP or array.scales is None or array.mins is not None:
        return False
    bits = _bits(array)
    is_power = ((bits & MANTISSA) == 0) | (bits == SMALLEST)
    return bool((is_power & (bits >> 23 <= LARGEST_EXPONENT)).all())


def exponents(array: QuantizedArray) -> npt.NDArray[np.uint8]:
    """Return the scales as their file had them, `[n, k / 32]`."""
    return (_bits(array) >> 23).astype(np.uint8)


def _bits(array: QuantizedArray) -> npt.NDArray[np.uint32]:
    assert array.scales is not None
    return np.ascontiguousarray(array.scales, np.float32).view(np.uint32)


def pack(codes: Tensor, exponents: Tensor) -> Mxfp4Matrix:
    """Lay out `codes [n, k]`, one a byte, and `exponents [n, k / 32]`, both uint8, where they are."""
    (n, k), num_strips = codes.shape, cdiv(codes.shape[1], STRIP)
    assert exponents.shape == (n, k // GROUP), (codes.shape, exponents.shape)
    assert k % GROUP == 0, codes.shape
    filled = codes.new_zeros(n, num_strips * STRIP, dtype=torch.int32)
    filled[:, :k] = codes
    first, second, third, fourth = filled.view(n, num_strips, PARTS, GROUP).permute(2, 1, 0, 3)  # [strips, n, 32] each
    words = _spread(first) << 6 | _spread(second) << 3 | _spread(third)
    fourth = _neighbours(fourth)
    words |= (fourth & 8) << 10 | (fourth & 6) << 9 | (fourth & 1) << 14
    wide = exponents.new_zeros(n, num_strips * PARTS, dtype=torch.int32)
    wide[:, : exponents.shape[1]] = exponents.int() + BIAS
    pairs = wide.view(n, num_strips, PARTS // 2, 2)  # two halves of a word each
    halves = pairs[:, :, 0] << 7 | pairs[:, :, 1] >> 1 | (pairs[:, :, 1] & 1) << 15
    scales = halves.to(torch.int16).contiguous().view(torch.int32)[..., 0].T.contiguous()
    return Mxfp4Matrix(words.to(torch.int16).contiguous(), scales, k)


def _neighbours(words: Tensor) -> Tensor:
    """Exchange columns with even and odd numbers."""
    return words.reshape(*words.shape[:-1], -1, 2).flip(-1).reshape(words.shape)


def _spread(codes: Tensor) -> Tensor:
    """Return codes with their sign six bits further up, where that of a bfloat16 is from its exponent."""
    return (codes & 8) << 6 | codes & 7


def unpack(matrix: Mxfp4Matrix) -> Tensor:
    """Return the weight in float32, `[n, k]`."""
    words, halves = matrix.words.to(torch.int32), matrix.scales.view(torch.int16).view(*matrix.scales.shape, 2).int()
    fourth = _neighbours(words)
    fourth = fourth << 2 & 0x8000 | fourth >> 3 & 0x0180 | fourth >> 8 & 0x0040
    bits = torch.stack([words, words << 3, words << 6, fourth], dim=2) & 0x81C0  # [strips, n, 4, 32]
    exponents = torch.cat([halves >> 7, halves << 1 | (halves >> 15 & 1)], dim=-1) & 0xFF
    scales = (exponents << 23).view(torch.float32)
    full = ((bits << 16).view(torch.float32) * scales[..., None]).transpose(0, 1).flatten(1)
    return full[:, : matrix.k].contiguous()


def tile_of(block: int, dtype: torch.dtype, num_rows: int) -> Tile:
    """Return the tile for blocks of so many tokens that read so many rows of weights in all."""
    if dtype.itemsize > 2:
        return WIDE_TILE
    few = (tile for most, tile in TILES_OF_FEW if block == MXFP4_BLOCKS[0] and num_rows <= most)
    return next(few, TILES[block])


def grouped_mxfp4(
    x: Tensor,
    weights: Mxfp4Experts,
    aligned: AlignedExperts,
    out: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Multiply each assignment's row by its expert: `out[a] = x[a // repeats] @ weights[expert of a]^T + bias`.

    `x` is `[num_tokens, k]` or `[num_assignments, k]`, which says what `repeats` is, `out` `[num_assignments, n]`,
    `bias` `[num_experts, n]`; all are contiguous and of one type. Added up in float32, the bias, too. The rows of a
    block choose the `tile` if it is None. Allocates nothing, and can be recorded.
    """
    num_assignments, n = out.shape
    repeats = check_grouped(x.shape, weights.shape, weights.num_experts, out, bias)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert x.is_contiguous(), x.stride()
    max_blocks = len(aligned.experts)
    tile = tile or tile_of(aligned.block, x.dtype, max_blocks * n)
    with torch.cuda.device_of(x):
        grouped_mxfp4_kernel[(max_blocks * cdiv(n, tile.block_n),)](
            x,
            weights.words,
            weights.scales,
            aligned.assignments,
            aligned.experts,
            bias,
            out,
            num_assignments,
            max_blocks,
            n,
            **constants(tile, aligned.block, x.shape[1], repeats, has_bias=bias is not None),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def constants(tile: Tile, block: int, k: int, repeats: int, *, has_bias: bool) -> dict[str, int]:
    """Return what the kernel is compiled with."""
    assert tile.block_k == STRIP, tile
    fixed = {"REPEATS": repeats, "GROUP": BLOCKS_A_GROUP, "ALIGNMENT": VECTOR_NBYTES, "BIASED": has_bias}
    return tile.constants(block, k) | fixed


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def grouped_mxfp4_kernel(
    x,
    words,
    scales,
    assignments,
    experts,
    bias,  # [num_experts, n] if BIASED
    out,
    num_assignments,
    max_blocks,
    n,
    REPEATS: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,  # strips
    EVEN: tl.constexpr,  # whether the last of them is full
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of the weights' addresses
    BIASED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Rows of the weight are those of the product: what is unpacked stays in registers, as the tensor cores take it."""
    expert, block, number = place_of_program(experts, max_blocks, n, BLOCK_N, GROUP)
    if expert < 0:
        return
    WORDS: tl.constexpr = BLOCK_K // 4
    assignment = tl.load(assignments + block * BLOCK_M + tl.arange(0, BLOCK_M))
    there, column = (assignment < num_assignments)[:, None], tl.arange(0, WORDS)
    of_x = x + (assignment // REPEATS).to(tl.int64)[:, None] * K + column[None, :]
    row = tl.minimum(number, n - 1)
    first_word = tl.multiple_of(tl.load(words + expert).to(tl.pointer_type(tl.int16)), ALIGNMENT)
    of_words = first_word + row[:, None] * WORDS + column[None, :]
    of_scales = tl.multiple_of(tl.load(scales + expert).to(tl.pointer_type(tl.int32)), ALIGNMENT) + row
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(STEPS):
        weights = unpacked(tl.load(of_words), tl.load(of_scales), x.dtype.element_ty, COMPILED)
        for part in tl.static_range(4):
            inside = there if EVEN else there & (column + (step * BLOCK_K + part * WORDS) < K)[None, :]
            rows = tl.load(of_x + part * WORDS, mask=inside, other=0.0)
            total = tl.dot(weights[part], rows.T, total, input_precision="ieee")
        of_x += BLOCK_K
        of_words += n * WORDS
        of_scales += n
    if BIASED:
        total += tl.load(bias + expert.to(tl.int64) * n + row).to(tl.float32)[:, None]
    place = out + assignment.to(tl.int64)[:, None] * n + number[None, :]
    tl.store(place, total.T.to(out.dtype.element_ty), mask=there & (number < n)[None, :])


@triton.jit
def unpacked(words, scales, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the four numbers of each word `[rows, words]`, whose row's scales are a byte each of `scales [rows]`."""
    if COMPILED and DTYPE.is_bf16():
        first, second, third, fourth = brain_factors(scales)
        return tl.inline_asm_elementwise(
            TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, first, second, third, fourth],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif COMPILED and DTYPE.is_fp16():
        first, second, third, fourth = brain_factors(scales)
        return tl.inline_asm_elementwise(
            TO_FLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, half_factor(first), half_factor(second), half_factor(third), half_factor(fourth)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        even, odd = tl.split(bits.reshape(bits.shape[0], bits.shape[1] // 2, 2))
        fourth = tl.join(odd, even).reshape(bits.shape)
        fourth = fourth << 2 & 0x8000 | fourth >> 3 & 0x0180 | fourth >> 8 & 0x0040
        return (
            scaled(bits, scales >> 7, DTYPE),
            scaled(bits << 3, scales >> 23, DTYPE),
            scaled(bits << 6, scales << 1 & 0xFE | scales >> 15 & 1, DTYPE),
            scaled(fourth, scales >> 15 & 0xFE | scales >> 31 & 1, DTYPE),
        )


@triton.jit
def brain_factors(scales):
    """Return two to the power of each scale's exponent less 127, `[rows, 1]`: they are the exponents of bfloat16s."""
    swapped = tl.inline_asm_elementwise(SWAP_BYTES, "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1)
    first, third = scales & 0x7F807F80, swapped & 0x7F807F80
    return lower_half(first), lower_half(first >> 16), lower_half(third), lower_half(third >> 16)


@triton.jit
def lower_half(words):
    return words.to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def half_factor(factor):
    """Return a factor over 2^112, so much less is the bias of a float16."""
    return (factor.to(tl.float32) * (2.0**-112)).to(tl.float16)


@triton.jit
def scaled(bits, exponents, DTYPE: tl.constexpr):
    """Return the numbers whose bits are where those of a bfloat16 are, whose bias is in the scales."""
    numbers = ((bits & 0x81C0) << 16).to(tl.float32, bitcast=True)
    scales = ((exponents & 0xFF) << 23).to(tl.float32, bitcast=True)
    return (numbers * scales[:, None]).to(DTYPE)
