"""Experts in FP8 (e4m3), multiplied by the tokens that chose them: both sides are codes on the tensor cores.

States are quantised before, once a token (`fp8_rows.py`); programs gather their codes and scales. Rows of the weight
are those of the product. What is multiplied is 128 columns, whose sum has a scale of the state's and one of the
weight's, or, where a whole row has one scale, all columns. The scheme is that of DeepSeek V3:
https://arxiv.org/abs/2412.19437, 3.3.

Rule: products are added up in order of the columns, for a `block` whatever the other rows are; every 128 of them in
float32, but for blocks of 128 tokens without a scale there: those sums stay in the tensor cores, which keep 14 bits, to
the end, as cuBLAS's fast accumulation does. What that loses is small beside what states lose in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.fp8_rows import GROUP, Fp8Rows, numbers_of, pointer, quantize_rows
from diptych.kernels.gpu.layers.moe import (
    BLOCKS_A_GROUP,
    VECTOR_NBYTES,
    AlignedExperts,
    addresses_of,
    check_grouped,
    place_of_program,
    roomy_block,
)

FP8_BLOCKS: Final = (16, 32, 64, 128)  # tokens, which are the columns of a tile
FIRST_BLOCK: Final = 64  # from so many tokens on, they are the left side: wgmma takes 64 rows there
BLOCK_TILES: Final = {  # for weights whose blocks have scales
    16: Tile(64, GROUP, 4, 4),
    32: Tile(128, GROUP, 3, 4),
    64: Tile(128, GROUP, 3, 4),
    128: Tile(128, GROUP, 4, 8),
}
ROW_TILES: Final = BLOCK_TILES | {64: Tile(128, GROUP, 4, 4), 128: Tile(128, GROUP, 5, 8)}
MANY: Final = 256  # tokens of an expert that make its last block of 128, which is half empty, cheap


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """One matrix of each expert, wherever they lie: nothing is copied."""

    SCRATCH: ClassVar = ("codes", "scales")  # addresses in one process: no weights, see `engine.weights.memory`

    matrices: tuple[Fp8Matrix, ...]  # of one shape and with scales alike
    codes: Tensor  # int64 [num_experts], addresses on the GPU
    scales: Tensor  # the same

    @staticmethod
    def of(matrices: Sequence[Fp8Matrix]) -> Fp8Experts:
        first = matrices[0]
        for matrix in matrices:
            assert (matrix.shape, matrix.group) == (first.shape, first.group), (matrix.shape, first.shape)
            assert matrix.scales.stride(0) == matrix.pitch, matrix.scales.stride()
        codes, scales = ([getattr(matrix, name) for matrix in matrices] for name in ("codes", "scales"))
        return Fp8Experts(tuple(matrices), addresses_of(codes), addresses_of(scales))

    @property
    def shape(self) -> tuple[int, int]:
        """That of each matrix."""
        return self.matrices[0].shape

    @property
    def num_experts(self) -> int:
        return len(self.matrices)

    def block(self, num_assignments: int) -> int:
        """See `choose_block`."""
        return choose_block(num_assignments, self.num_experts, self.matrices[0].group)

    def multiply(
        self, x: Tensor, aligned: AlignedExperts, chosen: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """Quantise `x` and see `grouped_fp8`, which knows from `aligned` what is `chosen`."""
        grouped_fp8(quantize_rows(x, self.matrices[0].group), self, aligned, out, bias)


def choose_block(num_assignments: int, num_experts: int, group: int) -> int:
    """Return how many rows `grouped_fp8` should multiply at once with weights that have a scale for `group` columns."""
    is_wide = group == 0 and num_assignments >= MANY * num_experts
    return roomy_block(num_assignments, num_experts, FP8_BLOCKS[0], FP8_BLOCKS[-1 if is_wide else -2])


def tile_of(block: int, group: int) -> Tile:
    """Return the tile for blocks of so many tokens."""
    return (BLOCK_TILES if group else ROW_TILES)[block]


def grouped_fp8(
    x: Fp8Rows,
    weights: Fp8Experts,
    aligned: AlignedExperts,
    out: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Multiply each assignment's row by its expert: `out[a] = x[a // repeats] @ weights[expert of a]^T + bias`.

    `x` is `[num_tokens, k]` or `[num_assignments, k]`, which says what `repeats` is, quantised as the weights' `group`
    says, `out` `[num_assignments, n]`, `bias` `[num_experts, n]`; all are contiguous, the last two of one type. The
    bias is added in float32. The rows of a block choose the `tile` if it is None. Allocates nothing, and can be
    recorded.
    """
    (num_assignments, n), (num_rows, k) = out.shape, x.codes.shape
    repeats = check_grouped(x.codes.shape, weights.shape, weights.num_experts, out, bias)
    assert x.scales.shape == (num_rows, cdiv(k, weights.matrices[0].group or k)), x.scales.shape
    assert x.scales.T.is_contiguous(), x.scales.stride()
    max_blocks, tile = len(aligned.experts), tile or tile_of(aligned.block, weights.matrices[0].group)
    with torch.cuda.device_of(out):
        grouped_fp8_kernel[(max_blocks * cdiv(n, tile.block_n),)](
            pointer(x.codes),
            x.scales,
            weights.codes,
            weights.scales,
            aligned.assignments,
            aligned.experts,
            bias,
            out,
            num_assignments,
            num_rows,
            max_blocks,
            n,
            **constants(tile, aligned.block, weights.matrices[0], repeats, has_bias=bias is not None),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def constants(tile: Tile, block: int, matrix: Fp8Matrix, repeats: int, *, has_bias: bool) -> dict[str, int]:
    """Return what the kernel is compiled with."""
    assert matrix.group in (0, tile.block_k), (matrix.group, tile)
    fixed = {"REPEATS": repeats, "GROUP": BLOCKS_A_GROUP, "ALIGNMENT": VECTOR_NBYTES, "BIASED": has_bias}
    scales = {"BLOCKED": matrix.group > 0, "ROWS_A_SCALE": matrix.group or 1, "PITCH": matrix.pitch}
    scales |= {"TOKENS_FIRST": block >= FIRST_BLOCK, "FAST": matrix.group == 0 and block == FP8_BLOCKS[-1]}
    return tile.constants(block, matrix.shape[1]) | fixed | scales


def reference_grouped_fp8(x: Tensor, matrices: Sequence[Fp8Matrix], chosen: Tensor) -> Tensor:
    """Return what quantised states make with the weights, in float64."""
    quantized = quantize_rows(x, matrices[0].group).dequantize().double()
    rows, numbers = quantized.repeat_interleave(chosen.numel() // len(x), dim=0), chosen.flatten().tolist()
    used = {id(matrices[number]): matrices[number] for number in numbers}  # of experts that are alike, one is expanded
    weights = {key: matrix.dequantize().double() for key, matrix in used.items()}
    return torch.stack([weights[id(matrices[number])] @ row for row, number in zip(rows, numbers, strict=True)])


@triton.jit(do_not_specialize=["num_assignments", "num_rows", "max_blocks"])
def grouped_fp8_kernel(
    x,
    x_scales,  # [columns / BLOCK_K if BLOCKED else 1, num_rows]
    codes,
    scales,
    assignments,
    experts,
    bias,  # [num_experts, n] if BIASED
    out,
    num_assignments,
    num_rows,
    max_blocks,
    n,
    REPEATS: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,  # whether the last of them is full
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of the weights' addresses
    BIASED: tl.constexpr,
    BLOCKED: tl.constexpr,  # whether a step has scales of its own
    ROWS_A_SCALE: tl.constexpr,
    PITCH: tl.constexpr,  # scales
    TOKENS_FIRST: tl.constexpr,  # whether tokens are the left side
    FAST: tl.constexpr,  # whether the tensor cores keep the sums of all columns
    COMPILED: tl.constexpr,
):
    expert, block, number = place_of_program(experts, max_blocks, n, BLOCK_N, GROUP)
    if expert < 0:
        return
    assignment = tl.load(assignments + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_there, column = assignment < num_assignments, tl.arange(0, BLOCK_K)
    token, there, row = (assignment // REPEATS).to(tl.int64), is_there[:, None], tl.minimum(number, n - 1)
    of_x = x + token[:, None] * K + column[None, :]
    weight = tl.multiple_of(tl.load(codes + expert).to(tl.pointer_type(x.dtype.element_ty)), ALIGNMENT)
    of_codes = weight + row.to(tl.int64)[:, None] * K + column[None, :]
    first_scale, of_x_scales = tl.load(scales + expert).to(tl.pointer_type(tl.float32)), x_scales + token
    if ROWS_A_SCALE % BLOCK_N == 0:  # one for all rows of the tile
        of_scales = first_scale + tl.min(row, axis=0) // ROWS_A_SCALE * PITCH
    else:
        of_scales = first_scale + row // ROWS_A_SCALE * PITCH
    if BLOCKED:
        x_scale, scale = tl.load(of_x_scales, mask=is_there, other=0.0), tl.load(of_scales)
    total = tl.zeros((BLOCK_M, BLOCK_N) if TOKENS_FIRST else (BLOCK_N, BLOCK_M), tl.float32)
    for step in range(STEPS):
        if EVEN:
            rows, weights = tl.load(of_x, mask=there, other=0.0), tl.load(of_codes)
        else:
            inside = (column + step * BLOCK_K < K)[None, :]
            rows = tl.load(of_x, mask=there & inside, other=0.0)
            weights = tl.load(of_codes, mask=inside, other=0.0)
        if BLOCKED:
            product = dot(rows, weights, tl.zeros_like(total), TOKENS_FIRST, COMPILED)
            total += product * by_tile(x_scale, scale, TOKENS_FIRST)
            following = tl.minimum(step + 1, STEPS - 1)  # is loaded while this one is multiplied
            x_scale = tl.load(of_x_scales + following * num_rows, mask=is_there, other=0.0)
            scale = tl.load(of_scales + following)
        elif FAST:
            total = dot(rows, weights, total, TOKENS_FIRST, COMPILED)
        else:
            total += dot(rows, weights, tl.zeros_like(total), TOKENS_FIRST, COMPILED)
        of_x += BLOCK_K
        of_codes += BLOCK_K
    if not BLOCKED:
        x_scale, scale = tl.load(of_x_scales, mask=is_there, other=0.0), tl.load(of_scales)
        total *= by_tile(x_scale, scale, TOKENS_FIRST)
    if not TOKENS_FIRST:
        total = total.T
    if BIASED:
        total += tl.load(bias + expert.to(tl.int64) * n + row).to(tl.float32)[None, :]
    place = out + assignment.to(tl.int64)[:, None] * n + number[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there & (number < n)[None, :])


@triton.jit
def dot(rows, weights, total, TOKENS_FIRST: tl.constexpr, COMPILED: tl.constexpr):
    if not COMPILED:
        rows, weights = numbers_of(rows, COMPILED), numbers_of(weights, COMPILED)
    if TOKENS_FIRST:
        return tl.dot(rows, weights.T, total, input_precision="ieee")
    else:
        return tl.dot(weights, rows.T, total, input_precision="ieee")


@triton.jit
def by_tile(x_scale, scale, TOKENS_FIRST: tl.constexpr):
    """Return the products of the states' scales, `[tokens]`, with those of the weight, one or `[rows]`."""
    if not scale.type.is_block():
        products = x_scale * scale
        return products[:, None] if TOKENS_FIRST else products[None, :]
    elif TOKENS_FIRST:
        return x_scale[:, None] * scale[None, :]
    else:
        return scale[:, None] * x_scale[None, :]
