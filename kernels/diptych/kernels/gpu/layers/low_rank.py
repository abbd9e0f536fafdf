"""What low-rank adapters add to a matrix's product, for the tokens of each: all adapters of a batch in two launches.

`shrink` multiplies by A, in parts of the columns so that few tokens keep all of a GPU busy; `expand` adds up the parts,
rounds them to the type of the states, and multiplies by B. They are segmented products as in Punica
(https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285); here a tile of tokens has one slot,
whose ranks and places are read on the GPU. So one recorded launch serves whoever is in a batch. Rule: a row of `out`
that is in no tile is neither read nor written, and the sums of one that is do not depend on the other rows of its tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.token_tiles import SMALL_TILE, TokenTiles

RANKS: Final = 16  # that tensor cores take at once: ranks are filled up with zeros
PART_NUMBERS: Final = 5  # of a part in a slot's head: offsets of A and B in the slot, rank, first column, columns
MOST_RANKS: Final = 64  # of a program
MIN_COLUMNS: Final = 256  # of x that a program multiplies
PROGRAMS: Final = 264  # two on each multiprocessor of an H200
SPLITS: Final = (1, 4, 16)  # of the columns; each number of them is compiled for itself


@dataclass(frozen=True, slots=True, eq=False)
class SlotMemory:
    """The adapters of a model by slot. A slot begins with its head, int64 `[num_parts, PART_NUMBERS]`.

    A part is a product: A `[rank, k]` and B `[n, rank]`, dense, at offsets that are multiples of 16. Rank 0: none.
    """

    memory: Tensor  # [num_slots, slot_size], of the states' type
    max_rank: int  # of a part, a multiple of `RANKS`

    @property
    def heads(self) -> Tensor:
        """The same memory as int64."""
        return self.memory.view(torch.int64)


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts belong to one matrix."""

    first: int
    count: int
    num_rows: int  # of the largest
    is_aligned: bool  # whether each begins and ends at a multiple of 16 columns of the result, and that itself does


def add_low_rank(x: Tensor, tiles: TokenTiles, slots: SlotMemory, parts: Parts, out: Tensor) -> None:
    """Add `(x @ A^T) @ B^T` of each part of a token's slot to its columns of `out`.

    `x [num_tokens, k]` and `out [num_tokens, n]` are contiguous and of the slots' type, `parts` a matrix's.
    """
    assert x.dtype == out.dtype == slots.memory.dtype, (x.dtype, out.dtype, slots.memory.dtype)
    assert len(x) == len(out) == len(tiles.tokens), (x.shape, out.shape, tiles.tokens.shape)
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    if not len(x):
        return
    num_tiles, k = len(tiles.tiles), x.shape[1]
    block_r, block_k = min(MOST_RANKS, power_of_two(slots.max_rank)), 128 if x.dtype.itemsize == 2 else 32
    rank_blocks = cdiv(slots.max_rank, block_r)
    splits, columns = split(k, num_tiles * parts.count * rank_blocks, block_k)
    inner = x.new_empty(splits, len(x), parts.count * slots.max_rank, dtype=torch.float32)
    with torch.cuda.device_of(x):
        shrink_kernel[(splits, parts.count * rank_blocks, num_tiles)](
            *(x, slots.memory, slots.heads, tiles.tokens, tiles.tiles, inner),
            *(k, columns, len(x), slots.memory.stride(0), slots.heads.stride(0), parts.first),
            MAX_RANK=slots.max_rank,
            TILE=tiles.size,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=3,
        )
        _expand(inner, tiles, slots, parts, out)


def add_picked(ids: Tensor, tiles: TokenTiles, slots: SlotMemory, parts: Parts, out: Tensor) -> None:
    """Add `A[ids] @ B^T`, where the A of `parts` is that of an embedding, kept as `[vocab_size, rank]`.

    `ids`, int64 `[num_tokens]`, are below `vocab_size`; the rest is as for `add_low_rank`.
    """
    assert out.dtype == slots.memory.dtype, (out.dtype, slots.memory.dtype)
    assert len(ids) == len(out) == len(tiles.tokens), (ids.shape, out.shape, tiles.tokens.shape)
    assert out.is_contiguous(), out.stride()
    if not len(ids):
        return
    inner = out.new_empty(1, len(out), parts.count * slots.max_rank, dtype=torch.float32)
    with torch.cuda.device_of(out):
        pick_kernel[(len(tiles.tiles), parts.count)](
            *(ids, slots.memory, slots.heads, tiles.tokens, tiles.tiles, inner),
            *(slots.memory.stride(0), slots.heads.stride(0), parts.first),
            MAX_RANK=slots.max_rank,
            TILE=tiles.size,
            BLOCK_R=power_of_two(slots.max_rank),
        )
        _expand(inner, tiles, slots, parts, out)


def run_all_expands(tiles: TokenTiles, slots: SlotMemory, parts: Parts, out: Tensor) -> None:
    """Run each variant there is for such tiles, so that it is compiled; for slots whose parts have rank 0."""
    with torch.cuda.device_of(out):
        for splits in SPLITS:
            size = (splits, len(out), parts.count * slots.max_rank)
            _expand(out.new_empty(size, dtype=torch.float32), tiles, slots, parts, out)


def _expand(inner: Tensor, tiles: TokenTiles, slots: SlotMemory, parts: Parts, out: Tensor) -> None:
    block_n = 64 if tiles.size == SMALL_TILE else 128
    expand_kernel[(cdiv(parts.num_rows, block_n), len(tiles.tiles), parts.count)](
        *(inner, slots.memory, slots.heads, tiles.tokens, tiles.tiles, out),
        *(len(out), out.shape[1], slots.memory.stride(0), slots.heads.stride(0), parts.first),
        MAX_RANK=slots.max_rank,
        TILE=tiles.size,
        BLOCK_R=min(MOST_RANKS, power_of_two(slots.max_rank)),
        BLOCK_N=block_n,
        SPLITS=len(inner),
        ALIGNED=parts.is_aligned,
        num_warps=4,
    )


def split(k: int, num_programs: int, block_k: int) -> tuple[int, int]:
    """Return into how many parts to divide `k` columns for so many programs each, and how many columns a part has."""
    most = max(1, min(PROGRAMS // num_programs, k // MIN_COLUMNS))
    splits = max(each for each in SPLITS if each <= most)
    return splits, cdiv(cdiv(k, splits), block_k) * block_k


@triton.jit
def tile_of(tiles, tile):
    return tl.load(tiles + tile * 3).to(tl.int64), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)


@triton.jit
def head_of(memory, heads, slot, part, slot_size, head_size, ALIGNED: tl.constexpr):
    """Return where the weights of a slot are, and what its head says of a part."""
    head = heads + slot * head_size + part * 5
    weights = memory + slot * slot_size
    a, b = tl.multiple_of(tl.load(head), 16), tl.multiple_of(tl.load(head + 1), 16)
    rank, start, num_rows = tl.multiple_of(tl.load(head + 2), 16), tl.load(head + 3), tl.load(head + 4)
    if ALIGNED:  # a load can be said to be a multiple only where it is
        start, num_rows = tl.multiple_of(start, 16), tl.multiple_of(num_rows, 16)
    return weights + a, weights + b, rank, start, num_rows


@triton.jit(do_not_specialize=["num_tokens", "first_part"])
def shrink_kernel(
    x,
    memory,
    heads,
    tokens,
    tiles,
    inner,  # [splits, num_tokens, num_parts * MAX_RANK], tokens as in `tokens`
    k,
    columns,  # of a split
    num_tokens,
    slot_size,
    head_size,
    first_part,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    split, tile = tl.program_id(0), tl.program_id(2)
    RANK_BLOCKS: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // RANK_BLOCKS
    slot, first, count = tile_of(tiles, tile)
    if count == 0:
        return
    a, _, rank, _, _ = head_of(memory, heads, slot, first_part + part, slot_size, head_size, False)
    ranks = tl.program_id(1) % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    if tl.program_id(1) % RANK_BLOCKS * BLOCK_R >= rank:
        return
    rows = tl.arange(0, TILE)
    there = rows < count
    token = tl.load(tokens + first + rows, mask=there, other=0).to(tl.int64)
    column = split * columns + tl.arange(0, BLOCK_K)
    of_x, of_a = x + token[:, None] * k + column[None, :], a + ranks[:, None] * k + column[None, :]
    total = tl.zeros((TILE, BLOCK_R), tl.float32)
    for _ in range(0, columns, BLOCK_K):
        inside = (column < k)[None, :]
        states = tl.load(of_x, mask=there[:, None] & inside, other=0.0)
        weights = tl.load(of_a, mask=(ranks < rank)[:, None] & inside, other=0.0)
        total = tl.dot(states, weights.T, total, input_precision="ieee")
        column += BLOCK_K
        of_x += BLOCK_K
        of_a += BLOCK_K
    width = tl.num_programs(1) // RANK_BLOCKS * MAX_RANK
    row = (split.to(tl.int64) * num_tokens + first + rows) * width + part * MAX_RANK
    tl.store(inner + row[:, None] + ranks[None, :], total, mask=there[:, None] & (ranks < rank)[None, :])


@triton.jit
def pick_kernel(
    ids,
    memory,
    heads,
    tokens,
    tiles,
    inner,  # [num_tokens, num_parts * MAX_RANK]
    slot_size,
    head_size,
    first_part,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    slot, first, count = tile_of(tiles, tile)
    if count == 0:
        return
    a, _, rank, _, _ = head_of(memory, heads, slot, first_part + part, slot_size, head_size, False)
    rows, ranks = tl.arange(0, TILE), tl.arange(0, BLOCK_R)
    there = rows < count
    token = tl.load(tokens + first + rows, mask=there, other=0)
    picked = tl.load(ids + token, mask=there, other=0)
    inside = there[:, None] & (ranks < rank)[None, :]
    numbers = tl.load(a + picked[:, None] * rank + ranks[None, :], mask=inside, other=0.0)
    row = (first + rows) * (tl.num_programs(1) * MAX_RANK) + part * MAX_RANK
    tl.store(inner + row[:, None] + ranks[None, :], numbers.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "first_part"])
def expand_kernel(
    inner,  # [splits, num_tokens, num_parts * MAX_RANK], tokens as in `tokens`
    memory,
    heads,
    tokens,
    tiles,
    out,
    num_tokens,
    out_size,
    slot_size,
    head_size,
    first_part,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    tile, part = tl.program_id(1), tl.program_id(2)
    slot, first, count = tile_of(tiles, tile)
    if count == 0:
        return
    _, b, rank, start, num_rows = head_of(memory, heads, slot, first_part + part, slot_size, head_size, ALIGNED)
    if (rank == 0) | (tl.program_id(0) * BLOCK_N >= num_rows):
        return
    rows, column = tl.arange(0, TILE), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.num_programs(2) * MAX_RANK
    there, inside = (rows < count)[:, None], column < num_rows
    of_inner = inner + (first + rows).to(tl.int64)[:, None] * width + part * MAX_RANK
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for begin in tl.static_range(0, MAX_RANK, BLOCK_R):
        ranks = begin + tl.arange(0, BLOCK_R)
        known = (ranks < rank)[None, :]
        weights = tl.load(b + column[:, None] * rank + ranks[None, :], mask=inside[:, None] & known, other=0.0)
        shrunk, of_split = tl.zeros((TILE, BLOCK_R), tl.float32), of_inner + ranks[None, :]
        for _ in tl.static_range(SPLITS):
            shrunk += tl.load(of_split, mask=there & known, other=0.0)
            of_split += num_tokens * width
        total = tl.dot(shrunk.to(weights.dtype), weights.T, total, input_precision="ieee")
    token = tl.load(tokens + first + rows, mask=rows < count, other=0).to(tl.int64)
    to = out + token[:, None] * out_size + start + column[None, :]
    result = tl.load(to, mask=there & inside[None, :], other=0.0).to(tl.float32) + total
    tl.store(to, result.to(out.dtype.element_ty), mask=there & inside[None, :])
