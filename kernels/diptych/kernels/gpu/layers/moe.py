"""A mixture of experts: tokens are put in order of the experts that were chosen for them, and multiplied by these.

An *assignment* is a token and one of its experts: number `token * experts_per_token + choice`. Nothing leaves the GPU:
grids are as large as the worst case of the shapes, and programs without work end at once. Rule: each row is computed by
itself, so that, for a `block`, it does not depend on the other tokens, and sums are in order of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.layers.dot_rows import Tile, dot_rows
from diptych.kernels.quantized import QuantizedArray

TILE_ASSIGNMENTS: Final = 1024
MIN_COUNTED: Final = 128  # assignments
TILE_NUMBERS: Final = 1024  # of a combined row
VECTOR_NBYTES: Final = 16  # what one thread copies at once
BLOCKS_A_GROUP: Final = 8  # that take the same rows of a weight one after the other, while they are in the L2 cache


@dataclass(frozen=True, slots=True)
class AlignedExperts:
    """Assignments in blocks of one expert each, in order of the experts, then of the assignments; on the GPU."""

    assignments: Tensor  # int32 [max_blocks, block]; their count where a block is not full
    experts: Tensor  # int32 [max_blocks]; -1: there is no such block

    @property
    def block(self) -> int:
        return self.assignments.shape[1]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix `[n, k]` of each expert, wherever they lie: nothing is copied."""

    SCRATCH: ClassVar = ("addresses",)  # those of one process: no weights, see `engine.weights.memory`

    tensors: tuple[Tensor, ...]  # contiguous, of one shape and type
    addresses: Tensor  # int64 [num_experts], on the GPU

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        assert all(tensor.is_contiguous() for tensor in tensors)
        return cls(tuple(tensors), addresses_of(tensors))

    @property
    def shape(self) -> tuple[int, int]:
        """That of each matrix."""
        n, k = self.tensors[0].shape
        return n, k

    @property
    def num_experts(self) -> int:
        return len(self.tensors)

    def block(self, num_assignments: int) -> int:
        """See `choose_block`."""
        return choose_block(num_assignments, self.num_experts)

    def multiply(
        self, x: Tensor, aligned: AlignedExperts, chosen: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """See `grouped_gemm`; `bias [num_experts, n]` is added to what that has rounded."""
        grouped_gemm(x, self, aligned, out)
        if bias is not None:
            out.add_(bias[chosen.flatten().clamp(max=self.num_experts - 1)])


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return where tensors of one shape and type lie, int64 `[len(tensors)]`, on their GPU."""
    first = tensors[0]
    for tensor in tensors:
        assert (tensor.shape, tensor.dtype) == (first.shape, first.dtype), (tensor.shape, tensor.dtype)
        assert tensor.data_ptr() % VECTOR_NBYTES == 0, tensor.data_ptr()
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=first.device)


def check_grouped(
    x_shape: tuple[int, ...], weights_shape: tuple[int, int], num_experts: int, out: Tensor, bias: Tensor | None
) -> int:
    """Assert that a grouped product's operands fit each other; return how many assignments each row of x has.

    `x_shape`: `[num_tokens, k]` or `[num_assignments, k]`; `out` `[num_assignments, n]`, `bias` `[num_experts, n]`.
    """
    (num_rows, k), (num_assignments, n) = x_shape, out.shape
    repeats, rest = divmod(num_assignments, num_rows)
    assert rest == 0 < repeats, (x_shape, out.shape)
    assert weights_shape == (n, k), (x_shape, weights_shape, out.shape)
    assert out.is_contiguous(), out.stride()
    if bias is not None:
        assert (bias.shape, bias.dtype) == ((num_experts, n), out.dtype), (bias.shape, bias.dtype)
        assert bias.is_contiguous(), bias.stride()
    return repeats


BLOCKS: Final = (16, 32, 64, 128)  # rows that are multiplied at once
ROOMY: Final = 64  # the largest block that may have room for twice what an expert gets
NARROW_TILES: Final = dict(
    zip(BLOCKS, (*[Tile(64, 128, 4, 4)] * 2, Tile(128, 64, 4, 4), Tile(128, 64, 4, 8)), strict=True)
)
WIDE_TILES: Final = dict.fromkeys(BLOCKS, Tile(32, 16, 3, 8))  # float32 is for comparisons


def choose_block(num_assignments: int, num_experts: int) -> int:
    """Return how many rows `grouped_gemm` should multiply at once: what an expert has on average, within its tiles."""
    average = power_of_two(max(1, num_assignments // num_experts))
    return int(min(BLOCKS[-1], max(BLOCKS[0], average)))


def roomy_block(num_assignments: int, num_experts: int, smallest: int, largest: int) -> int:
    """Return the same for weights of which a second block of an expert unpacks its part, or reads it, once more.

    There is room for twice what an expert has on average, unless that is much.
    """
    average = power_of_two(max(1, num_assignments // num_experts))
    return int(min(largest, max(smallest, average, min(ROOMY, 2 * average))))


def tile_of(block: int, nbytes: int) -> Tile:
    """Return the tile for so many rows of numbers of so many bytes."""
    return (NARROW_TILES if nbytes == 2 else WIDE_TILES)[block]


def align_experts(chosen: Tensor, num_experts: int, block: int) -> AlignedExperts:
    """Put the assignments `chosen [num_tokens, experts_per_token]` (int32 or int64 numbers of experts) in order.

    The number `num_experts` is nobody's: such assignments are left out. Allocates the result and, of many, a count of
    each expert's.
    """
    assert chosen.is_contiguous(), chosen.stride()
    size = chosen.numel()
    max_blocks = (size + min(size, num_experts) * (block - 1)) // block
    assignments = torch.empty(max_blocks, block, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=chosen.device)
    counts = None
    with torch.cuda.device_of(chosen):
        if size > TILE_ASSIGNMENTS:  # fewer are counted where they are placed: a launch less
            counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
            count_kernel[(num_experts,)](chosen, counts, size, TILE=TILE_ASSIGNMENTS)
        place_kernel[(num_experts,)](
            chosen,
            counts,
            assignments,
            experts,
            size,
            max_blocks,
            NUM_EXPERTS=num_experts,
            EXPERTS=power_of_two(num_experts),
            BLOCK=block,
            TILE=TILE_ASSIGNMENTS if counts is not None else max(MIN_COUNTED, power_of_two(size)),
            COUNTED=counts is not None,
        )
    return AlignedExperts(assignments, experts)


def grouped_gemm(x: Tensor, weights: ExpertWeights, aligned: AlignedExperts, out: Tensor) -> None:
    """Multiply each assignment's row by its expert: `out[a] = x[a // repeats] @ weights[expert of a]^T`.

    `x` is `[num_tokens, k]` or `[num_assignments, k]`, which says what `repeats` is, `out` `[num_assignments, n]`, both
    contiguous and of the weights' type; added up in float32.
    """
    (num_assignments, n), k, weight = out.shape, x.shape[1], weights.tensors[0]
    repeats = check_grouped(x.shape, weights.shape, weights.num_experts, out, None)
    assert x.dtype == weight.dtype == out.dtype, (x.dtype, weight.dtype, out.dtype)
    assert x.is_contiguous(), x.stride()
    tile, max_blocks = tile_of(aligned.block, x.dtype.itemsize), len(aligned.experts)
    with torch.cuda.device_of(x):
        grouped_gemm_kernel[(max_blocks * cdiv(n, tile.block_n),)](
            x,
            weights.addresses,
            aligned.assignments,
            aligned.experts,
            out,
            num_assignments,
            max_blocks,
            n,
            REPEATS=repeats,
            **tile.constants(aligned.block, k),
            GROUP=BLOCKS_A_GROUP,
            ALIGNMENT=VECTOR_NBYTES,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def combine_experts(results: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
    """Add up each token's `results [num_assignments, size]` by their shares, in float32, in order of the experts.

    Results with a share of 0 are not read. `chosen` (a token's experts differ) and `shares` are `[num_tokens,
    experts_per_token]`, `out` is `[num_tokens, size]`; all are contiguous.
    """
    num_tokens, size = out.shape
    assert chosen.shape == shares.shape == (num_tokens, len(results) // num_tokens), (chosen.shape, shares.shape)
    assert results.shape == (chosen.numel(), size), (results.shape, chosen.shape, out.shape)
    assert all(tensor.is_contiguous() for tensor in (results, chosen, shares, out))
    with torch.cuda.device_of(out):
        combine_kernel[(num_tokens, cdiv(size, TILE_NUMBERS))](
            results,
            chosen,
            shares,
            out,
            SIZE=size,
            NUM_CHOICES=chosen.shape[1],
            CHOICES=power_of_two(chosen.shape[1]),
            TILE=TILE_NUMBERS,
        )


def reference_grouped_gemm(x: Tensor, weights: ExpertWeights, chosen: Tensor) -> Tensor:
    """Return what `grouped_gemm` writes, in float64."""
    rows = x.double().repeat_interleave(chosen.numel() // len(x), dim=0)
    products = [weights.tensors[expert].double() @ row for row, expert in zip(rows, chosen.flatten(), strict=True)]
    return torch.stack(products)


def reference_grouped_quantized(x: Tensor, arrays: Sequence[QuantizedArray], chosen: Tensor) -> Tensor:
    """Return what products with experts in few bits should be, of states as they are and without a bias, in float64."""
    rows, numbers = x.double().repeat_interleave(chosen.numel() // len(x), dim=0), chosen.flatten().tolist()
    used = {id(arrays[number]): arrays[number] for number in numbers}  # of experts that are alike, one is expanded
    weights = {key: torch.from_numpy(array.dequantize()).to(x.device).double() for key, array in used.items()}
    return torch.stack([weights[id(arrays[number])] @ row for row, number in zip(rows, numbers, strict=True)])


def reference_combine(results: Tensor, shares: Tensor) -> Tensor:
    """Return what `combine_experts` writes, in float64, where the order does not matter."""
    return (results.double().view(*shares.shape, -1) * shares.double()[..., None]).sum(dim=1)


@triton.jit(do_not_specialize=["size"])  # else Triton compiles once more for multiples of 16, while serving
def count_kernel(chosen, counts, size, TILE: tl.constexpr):
    """Count the assignments of one expert."""
    expert = tl.program_id(0)
    total, start = 0, 0
    while start < size:
        place = start + tl.arange(0, TILE)
        experts = tl.load(chosen + place, mask=place < size, other=-1)
        total += tl.sum((experts == expert).to(tl.int32), axis=0)
        start += TILE
    tl.store(counts + expert, total)


@triton.jit(do_not_specialize=["size", "max_blocks"])
def place_kernel(
    chosen,
    counts,  # [NUM_EXPERTS] if COUNTED
    assignments,
    experts,
    size,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # the same as a power of 2
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # that takes all assignments unless COUNTED
    COUNTED: tl.constexpr,
):
    """One expert's assignments go to its blocks."""
    expert, number = tl.program_id(0), tl.arange(0, EXPERTS)
    if COUNTED:
        each = tl.load(counts + number, mask=number < NUM_EXPERTS, other=0)
    else:
        place = tl.arange(0, TILE)
        there = place < size
        numbers = tl.load(chosen + place, mask=there, other=0).to(tl.int32)
        each = tl.histogram(numbers, EXPERTS, mask=there & (numbers < NUM_EXPERTS))
    blocks = tl.cdiv(each, BLOCK)
    first = tl.sum(tl.where(number < expert, blocks, 0), axis=0)
    end = first + tl.sum(tl.where(number == expert, blocks, 0), axis=0)
    _fill(experts, first, end, expert, TILE)
    if expert == NUM_EXPERTS - 1:
        _fill(experts, end, max_blocks, -1, TILE)
    cursor, start = first * BLOCK, 0
    while start < size:
        place = start + tl.arange(0, TILE)
        mine = tl.load(chosen + place, mask=place < size, other=-1) == expert
        tl.store(assignments + cursor + tl.cumsum(mine.to(tl.int32), axis=0) - 1, place, mask=mine)
        cursor += tl.sum(mine.to(tl.int32), axis=0)
        start += TILE
    _fill(assignments, cursor, end * BLOCK, size, TILE)


@triton.jit
def _fill(array, start, end, value, TILE: tl.constexpr):
    while start < end:
        place = start + tl.arange(0, TILE)
        tl.store(array + place, value, mask=place < end)
        start += TILE


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def grouped_gemm_kernel(
    x,
    addresses,
    assignments,
    experts,
    out,
    num_assignments,
    max_blocks,
    n,
    REPEATS: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K columns each
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of the weights' addresses
):
    expert, block, number = place_of_program(experts, max_blocks, n, BLOCK_N, GROUP)
    if expert < 0:
        return
    assignment = tl.load(assignments + block * BLOCK_M + tl.arange(0, BLOCK_M))
    there, column = (assignment < num_assignments)[:, None], tl.arange(0, BLOCK_K)
    of_x = x + (assignment // REPEATS).to(tl.int64)[:, None] * K + column[None, :]
    weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    row = tl.minimum(number, n - 1).to(tl.int64)
    of_weight = tl.multiple_of(weight, ALIGNMENT) + row[:, None] * K + column[None, :]
    total = dot_rows(of_x, of_weight, there, column, K, STEPS, EVEN)
    place = out + assignment.to(tl.int64)[:, None] * n + number[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there & (number < n)[None, :])


@triton.jit
def place_of_program(experts, max_blocks, n, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the program's expert (-1: none), its block of assignments, and the rows of the weight that it takes."""
    tiles_a_group = GROUP * tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0) // tiles_a_group * GROUP
    height = tl.minimum(max_blocks - first, GROUP)
    block = first + tl.program_id(0) % tiles_a_group % height
    number = tl.program_id(0) % tiles_a_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(experts + block), block, number


@triton.jit
def combine_kernel(
    results,
    chosen,
    shares,
    out,
    SIZE: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    CHOICES: tl.constexpr,  # the same as a power of 2
    TILE: tl.constexpr,
):
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, CHOICES)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = choice < NUM_CHOICES
    expert = tl.load(chosen + token * NUM_CHOICES + choice, mask=there, other=2147483647)
    share = tl.load(shares + token * NUM_CHOICES + choice, mask=there, other=0.0).to(tl.float32)
    is_before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (choice[None, :] < choice[:, None])
    )
    order = tl.sum(is_before.to(tl.int32), axis=1)
    total = tl.zeros((TILE,), tl.float32)
    for rank in range(NUM_CHOICES):
        place = token * NUM_CHOICES + tl.sum(tl.where(order == rank, choice, 0), axis=0)
        weight = tl.sum(tl.where(order == rank, share, 0.0), axis=0)
        size = tl.where(weight != 0, SIZE, 0)  # nobody may have written what has no share
        total += tl.load(results + place * SIZE + column, mask=column < size, other=0.0).to(tl.float32) * weight
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
