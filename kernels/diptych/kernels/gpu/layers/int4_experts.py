"""Experts in integers of four bits, multiplied by the tokens that chose them: codes are read, no weight is expanded.

A *strip* is 128 columns. Its rows lie behind each other, 64 bytes each: a tile of rows is one stretch of memory. A word
of 16 bits has the codes of four columns that are 32 apart, so that each product of 32 columns has one scale a row. With
the exponent of 128 (of 1024 in half precision) above it, a code is a number less that power, which is taken away with
the zero point: https://arxiv.org/abs/2211.10017. What is left is a small integer, and exact in any type.

A scale and its zero point are one word: scales have 16 bits in checkpoints, so that a float32 of them ends with zeros.

Rule: products with integers are added up in float32 and in order of the columns, times the scale for each group of
columns; for a `block`, whatever the other rows are. Nothing but the result is rounded to the states' type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.integer_matrix import words_of
from diptych.kernels.gpu.layers.moe import (
    BLOCKS_A_GROUP,
    VECTOR_NBYTES,
    AlignedExperts,
    addresses_of,
    check_grouped,
    place_of_program,
    roomy_block,
)
from diptych.kernels.quantized import INT4_GROUPS, STRIP, Array, QuantizedArray

PARTS: Final = 4  # of a word
WORDS: Final = STRIP // PARTS  # of a row of a strip
MIDDLE: Final = 8  # the zero point of signed codes
ZERO_BITS: Final = 0xFF  # of a scale's word

INT4_BLOCKS: Final = (8, 16, 32, 64, 128)  # tokens, which are the columns of a tile
LARGEST_BLOCK: Final = 64  # a larger one is no faster, and more of it stays empty
TILES: Final = dict.fromkeys(INT4_BLOCKS, Tile(128, STRIP, 4, 4)) | {
    64: Tile(128, STRIP, 3, 4),
    128: Tile(64, STRIP, 3, 4),
}
TILES_OF_FEW: Final = (  # of the fewest tokens, and how many rows of weights they read at most
    (32_000, Tile(64, STRIP, 5, 4)),
    (64_000, Tile(64, STRIP, 4, 2)),
)
WIDE_TILE: Final = Tile(32, STRIP, 2, 8)  # float32 is for comparisons

# What is made of two words, $4: two numbers each of four columns, less the powers of two and zero points in $5.
TO_BFLOAT16: Final = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, $0, $5;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $1, $1, $6;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $2, $2, $7;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $3, $3, $8;
}""")
TO_FLOAT16: Final = tl.constexpr(
    TO_BFLOAT16.value.replace("0x43004300", "0x64006400").replace("bf16x2", "f16x2")  # 1024 in place of 128
)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A weight `[n, k]`; columns are filled up to whole strips, with scales of zero."""

    words: Tensor  # int16 [num_strips, n, 32]: four codes each, the first in the lowest bits
    scales: Tensor  # int32 [num_strips * groups of a strip, n]: float32s whose last `ZERO_BITS` are the zero point
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1], self.k

    @property
    def group(self) -> int:
        """Columns of a scale."""
        return STRIP * self.words.shape[0] // self.scales.shape[0]

    @staticmethod
    def of(arrays: Sequence[QuantizedArray], device: torch.device) -> Int4Matrix:
        """Lay out what `group_of` has a group of, on top of each other, in memory of `device`."""
        codes = torch.cat([torch.from_numpy(_unsigned(array)).to(device) for array in arrays])
        words = np.concatenate([_strip_scales(array) for array in arrays])
        return pack(codes, torch.from_numpy(words).to(device), _strip_group(arrays[0]))


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """One matrix of each expert, wherever they lie: nothing is copied."""

    SCRATCH: ClassVar = ("words", "scales")  # addresses in one process: no weights, see `engine.weights.memory`

    matrices: tuple[Int4Matrix, ...]  # of one shape and group
    words: Tensor  # int64 [num_experts], addresses on the GPU
    scales: Tensor  # the same

    @staticmethod
    def of(matrices: Sequence[Int4Matrix]) -> Int4Experts:
        first = matrices[0]
        for matrix in matrices:
            assert (matrix.shape, matrix.group) == (first.shape, first.group), (matrix.shape, first.shape)
        words, scales = ([getattr(matrix, name) for matrix in matrices] for name in ("words", "scales"))
        return Int4Experts(tuple(matrices), addresses_of(words), addresses_of(scales))

    @property
    def shape(self) -> tuple[int, int]:
        """That of each matrix."""
        return self.matrices[0].shape

    @property
    def num_experts(self) -> int:
        return len(self.matrices)

    def block(self, num_assignments: int) -> int:
        """See `roomy_block`."""
        return roomy_block(num_assignments, self.num_experts, INT4_BLOCKS[0], LARGEST_BLOCK)

    def multiply(
        self, x: Tensor, aligned: AlignedExperts, chosen: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """See `grouped_int4`, which knows from `aligned` what is `chosen`."""
        grouped_int4(x, self, aligned, out, bias)


def group_of(arrays: Sequence[QuantizedArray]) -> int | None:
    """Return the columns of a scale that the kernel would use for all of them; None if it cannot multiply them."""
    groups = {_strip_group(array) for array in arrays}
    if len(groups) > 1 or any(array.code != "int4" or array.scales is None for array in arrays):
        return None
    group = groups.pop()
    return group if group in INT4_GROUPS and all(_scale_words(array) is not None for array in arrays) else None


def _strip_group(array: QuantizedArray) -> int:
    """Return the columns of a scale, at most a strip."""
    return STRIP if array.group % STRIP == 0 else array.group  # 0: all columns


def _unsigned(array: QuantizedArray) -> Array:
    return array.codes if array.mins is not None else (array.codes + np.int8(MIDDLE)).view(np.uint8)


def _scale_words(array: QuantizedArray) -> Array | None:
    """Return scales with their zero points, int32 like the scales; None if one has not the form of a checkpoint's."""
    assert array.scales is not None
    scales = array.scales.astype(np.float32)
    zeros = np.full(scales.shape, np.float32(MIDDLE))
    if array.mins is not None:
        zeros = np.rint(-array.mins / np.where(scales == 0, np.float32(1), scales))
        if not (np.array_equal(-scales * zeros, array.mins) and 0 <= zeros.min() <= zeros.max() < STRIP):
            return None
    bits = scales.view(np.int32)
    return None if (bits & ZERO_BITS).any() else bits | zeros.astype(np.int32)


def _strip_scales(array: QuantizedArray) -> Array:
    """Return the words of `_scale_words` for groups of a strip at most."""
    words, group = _scale_words(array), array.group or array.shape[1]
    assert words is not None, array.format
    num_groups = cdiv(array.shape[1], _strip_group(array))
    return np.repeat(words, cdiv(group, _strip_group(array)), axis=1)[:, :num_groups]


def pack(codes: Tensor, scales: Tensor, group: int) -> Int4Matrix:
    """Lay out `codes [n, k]`, uint8 and one a byte, and `scales [n, k / group]`, int32, where they are."""
    n, k = codes.shape
    assert group in INT4_GROUPS, group
    assert scales.shape == (n, cdiv(k, group)), (codes.shape, scales.shape)
    words = words_of(codes, 4, WORDS)
    wide = scales.new_zeros(n, len(words) * (STRIP // group))
    wide[:, : scales.shape[1]] = scales
    return Int4Matrix(words, wide.T.contiguous(), k)


def unpack(matrix: Int4Matrix) -> Tensor:
    """Return the weight in float32, `[n, k]`."""
    words = matrix.words.int()
    codes = torch.stack([words >> 4 * part & 15 for part in range(PARTS)], dim=2)  # [strips, n, 4, 32]
    codes = codes.transpose(0, 1).flatten(1).view(len(words[0]), len(matrix.scales), matrix.group)
    scales = matrix.scales.T.contiguous()
    numbers = (codes - (scales & ZERO_BITS)[..., None]) * (scales & ~ZERO_BITS).view(torch.float32)[..., None]
    return numbers.flatten(1)[:, : matrix.k].contiguous()


def tile_of(block: int, dtype: torch.dtype, num_rows: int) -> Tile:
    """Return the tile for blocks of so many tokens that read so many rows of weights in all."""
    if dtype.itemsize > 2:
        return WIDE_TILE
    few = (tile for most, tile in TILES_OF_FEW if block == INT4_BLOCKS[0] and num_rows <= most)
    return next(few, TILES[block])


def grouped_int4(
    x: Tensor,
    weights: Int4Experts,
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
        grouped_int4_kernel[(max_blocks * cdiv(n, tile.block_n),)](
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
            **constants(tile, aligned.block, x.shape[1], repeats, weights.matrices[0].group, has_bias=bias is not None),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def constants(tile: Tile, block: int, k: int, repeats: int, group: int, *, has_bias: bool) -> dict[str, int]:
    """Return what the kernel is compiled with."""
    assert tile.block_k == STRIP, tile
    fixed = {"REPEATS": repeats, "GROUP": BLOCKS_A_GROUP, "ALIGNMENT": VECTOR_NBYTES, "BIASED": has_bias}
    return tile.constants(block, k) | fixed | {"SCALES": STRIP // group}


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def grouped_int4_kernel(
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
    SCALES: tl.constexpr,  # of a row of a strip
    COMPILED: tl.constexpr,
):
    """Rows of the weight are those of the product: what is unpacked stays in registers, as the tensor cores take it."""
    expert, block, number = place_of_program(experts, max_blocks, n, BLOCK_N, GROUP)
    if expert < 0:
        return
    WORDS: tl.constexpr = BLOCK_K // 4
    PARTS_A_SCALE: tl.constexpr = 4 // SCALES
    assignment = tl.load(assignments + block * BLOCK_M + tl.arange(0, BLOCK_M))
    there, column = (assignment < num_assignments)[:, None], tl.arange(0, WORDS)
    of_x = x + (assignment // REPEATS).to(tl.int64)[:, None] * K + column[None, :]
    row = tl.minimum(number, n - 1)
    first_word = tl.multiple_of(tl.load(words + expert).to(tl.pointer_type(tl.int16)), ALIGNMENT)
    of_words = first_word + row[:, None] * WORDS + column[None, :]
    of_scales = tl.multiple_of(tl.load(scales + expert).to(tl.pointer_type(tl.int32)), ALIGNMENT) + row
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(STEPS):
        first = tl.load(of_scales)
        second = tl.load(of_scales + n) if SCALES == 4 else first
        third = tl.load(of_scales + (SCALES // 2) * n) if SCALES > 1 else first
        fourth = tl.load(of_scales + 3 * n) if SCALES == 4 else third
        each = (first, second, third, fourth)
        weights = unpacked(tl.load(of_words), each, x.dtype.element_ty, COMPILED)
        for part in tl.static_range(4):
            inside = there if EVEN else there & (column + (step * BLOCK_K + part * WORDS) < K)[None, :]
            rows = tl.load(of_x + part * WORDS, mask=inside, other=0.0)
            if part % PARTS_A_SCALE == 0:
                partial = tl.dot(weights[part], rows.T, input_precision="ieee")
            else:
                partial = tl.dot(weights[part], rows.T, partial, input_precision="ieee")
            if part % PARTS_A_SCALE == PARTS_A_SCALE - 1:
                total += partial * (each[part] & -256).to(tl.float32, bitcast=True)[:, None]
        of_x += BLOCK_K
        of_words += n * WORDS
        of_scales += n * SCALES
    if BIASED:
        total += tl.load(bias + expert.to(tl.int64) * n + row).to(tl.float32)[:, None]
    place = out + assignment.to(tl.int64)[:, None] * n + number[None, :]
    tl.store(place, total.T.to(out.dtype.element_ty), mask=there & (number < n)[None, :])


@triton.jit
def unpacked(words, scales, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the four integers of each word `[rows, words]`, less the zero points in the words `scales`, `[rows]`."""
    if COMPILED and DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [
                words,
                above(scales[0], 0x4300, DTYPE),
                above(scales[1], 0x4300, DTYPE),
                above(scales[2], 0x4300, DTYPE),
                above(scales[3], 0x4300, DTYPE),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif COMPILED and DTYPE.is_fp16():
        return tl.inline_asm_elementwise(
            TO_FLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [
                words,
                above(scales[0], 0x6400, DTYPE),
                above(scales[1], 0x6400, DTYPE),
                above(scales[2], 0x6400, DTYPE),
                above(scales[3], 0x6400, DTYPE),
            ],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        return (
            less(bits, scales[0], DTYPE),
            less(bits >> 4, scales[1], DTYPE),
            less(bits >> 8, scales[2], DTYPE),
            less(bits >> 12, scales[3], DTYPE),
        )


@triton.jit
def above(scales, power, DTYPE: tl.constexpr):
    """Return the zero points above the power of two whose bits these are, `[rows, 1]`."""
    return (scales & 0xFF | power).to(tl.int16).to(DTYPE, bitcast=True)[:, None]


@triton.jit
def less(codes, scales, DTYPE: tl.constexpr):
    return ((codes & 15) - (scales & 0xFF)[:, None]).to(DTYPE)
