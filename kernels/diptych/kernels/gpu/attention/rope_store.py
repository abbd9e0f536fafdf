"""Rotates the queries and keys of new tokens and writes their keys and values into the pages of a layer, in one pass.

The position embedding is the two-halves form of RoFormer (arXiv 2104.09864). Rule: the numbers are those of plain torch
operations in the dtype of the states, each product and sum rounded to it, and for FP8 those of `gpu_casts`; so that
greedy tokens agree with the CPU's.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.casts import narrow
from diptych.kernels.gpu.grid import cdiv, power_of_two

TILE: Final = 4096  # numbers of a program
FIRST_FP8_CAPABILITY: Final = (8, 9)  # casts by an instruction; elsewhere, and in the interpreter, `gpu_casts` does


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    out_slots: Tensor,
    rope_table: Tensor,
    kv_layer: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_start: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate the queries of `qkv` in place; store its keys, rotated, and values at `out_slots` of `kv_layer`.

    `qkv` `[num_tokens, (num_heads + num_planes * num_kv_heads) * head_dim]`; its rows may have any stride, and its keys
    stay as they are.
    `positions` and `out_slots` `[num_tokens]`, int32 or int64: a slot is page * page_size + offset; a token of slot -1
    is padding, of which nothing is read or written. `rope_table` float32 `[num_positions, 2, rope_dim / 2]`, cosines
    and sines of `rope_dim` dimensions, the first ones or, from `rope_start` on, the last ones; the others are not
    rotated. `kv_layer` `[num_pages, num_planes, page_size, num_kv_heads, head_dim]` is a view of the pool, of keys and
    values or of keys alone; float8 (e4m3fn) holds the number divided by `k_scale`, `v_scale`, at most 448. Runs on the
    current stream and can be part of a CUDA graph.
    """
    num_planes = kv_layer.shape[1]
    num_states = num_heads + num_planes * num_kv_heads
    assert qkv.stride(1) == 1, qkv.stride()
    assert qkv.shape == (len(positions), num_states * head_dim), qkv.shape
    assert len(out_slots) == len(positions), (out_slots.shape, positions.shape)
    assert out_slots.is_contiguous(), out_slots.stride()
    assert rope_table.dtype == torch.float32, rope_table.dtype
    assert rope_table.is_contiguous(), rope_table.stride()
    assert num_planes in (1, 2), kv_layer.shape
    assert kv_layer.shape[3:] == (num_kv_heads, head_dim), kv_layer.shape
    assert kv_layer.stride(4) == 1, kv_layer.stride()
    rope_half = rope_table.shape[2]
    assert rope_start in (0, head_dim - 2 * rope_half), (rope_start, head_dim, rope_half)
    columns = power_of_two(rope_half)
    rest = power_of_two(head_dim - 2 * rope_half) if head_dim > 2 * rope_half else 0
    rows = min(power_of_two(num_states), max(1, TILE // max(2 * columns, rest)))
    is_fp8 = kv_layer.dtype == torch.float8_e4m3fn
    with torch.cuda.device_of(qkv):
        rope_store_kernel[(len(positions), cdiv(num_states, rows))](
            qkv,
            positions,
            out_slots,
            rope_table,
            kv_layer.view(torch.int8) if is_fp8 else kv_layer,
            qkv.stride(0),
            *kv_layer.stride()[:4],
            k_scale,
            v_scale,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            NUM_STATES=num_states,
            HEAD_DIM=head_dim,
            ROPE_START=rope_start,
            ROPE_HALF=rope_half,
            PAGE_SIZE=kv_layer.shape[2],
            FP8=is_fp8,
            SCALED=(k_scale, v_scale) != (1.0, 1.0),
            BY_INSTRUCTION=is_fp8 and _casts_to_fp8(qkv),
            ROWS=rows,
            COLUMNS=columns,
            REST=rest,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _casts_to_fp8(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= FIRST_FP8_CAPABILITY


@triton.jit(do_not_specialize_on_alignment=["positions", "out_slots"])  # parts of what was staged for a step
def rope_store_kernel(
    qkv,
    positions,
    out_slots,
    rope_table,
    kv,
    row_stride,
    page_stride,
    value_stride,
    slot_stride,
    head_stride,
    k_scale,
    v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_STATES: tl.constexpr,  # queries, keys, and values if they are stored
    HEAD_DIM: tl.constexpr,
    ROPE_START: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
    BY_INSTRUCTION: tl.constexpr,  # the GPU casts to FP8
    ROWS: tl.constexpr,  # heads a program: of queries, keys and values
    COLUMNS: tl.constexpr,  # ROPE_HALF as a power of two
    REST: tl.constexpr,  # dimensions that are not rotated, as a power of two
):
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_slots + token).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    in_half = columns < ROPE_HALF
    angles = rope_table + tl.load(positions + token).to(tl.int64) * 2 * ROPE_HALF + columns
    cos = tl.load(angles, mask=in_half & (slot >= 0), other=0.0).to(DTYPE)
    sin = tl.load(angles + ROPE_HALF, mask=in_half & (slot >= 0), other=0.0).to(DTYPE)
    if slot < 0:
        return
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_stored = (heads >= NUM_HEADS)[:, None] & (heads < NUM_STATES)[:, None]
    states = qkv + token * row_stride + heads[:, None] * HEAD_DIM
    kv_heads = tl.where(is_value, heads[:, None] - NUM_KV_HEADS, heads[:, None]) - NUM_HEADS
    cells = kv + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    cells += tl.where(is_value, value_stride, 0) + kv_heads * head_stride
    scales = tl.where(is_value, v_scale, k_scale)

    inside = in_half & (heads < NUM_STATES)[:, None]
    turning, turned_cells = states + ROPE_START, cells + ROPE_START
    first = tl.load(turning + columns, mask=inside, other=0.0)
    second = tl.load(turning + columns + ROPE_HALF, mask=inside, other=0.0)
    turned_first = turned(first, cos, second, -sin, DTYPE)
    turned_second = turned(second, cos, first, sin, DTYPE)
    tl.debug_barrier()  # in a small tile several threads load the same numbers: all of them before one stores
    tl.store(turning + columns, turned_first, mask=inside & is_query)
    tl.store(turning + columns + ROPE_HALF, turned_second, mask=inside & is_query)
    first, second = tl.where(is_value, first, turned_first), tl.where(is_value, second, turned_second)
    if FP8:
        first = narrowed(first, scales, SCALED, BY_INSTRUCTION)
        second = narrowed(second, scales, SCALED, BY_INSTRUCTION)
    tl.store(turned_cells + columns, first.to(cells.dtype.element_ty), mask=inside & is_stored)
    tl.store(turned_cells + columns + ROPE_HALF, second.to(cells.dtype.element_ty), mask=inside & is_stored)
    if REST:
        columns = tl.arange(0, REST)[None, :]
        inside = is_stored & (columns < HEAD_DIM - 2 * ROPE_HALF)
        if ROPE_START == 0:
            columns += 2 * ROPE_HALF
        rest = tl.load(states + columns, mask=inside, other=0.0)
        if FP8:
            rest = narrowed(rest, scales, SCALED, BY_INSTRUCTION)
        tl.store(cells + columns, rest.to(cells.dtype.element_ty), mask=inside)


@triton.jit
def turned(a, cos, b, sin, DTYPE: tl.constexpr):
    """Return a * cos + b * sin with every step rounded to the dtype."""
    left = (a.to(tl.float32) * cos.to(tl.float32)).to(DTYPE)
    right = (b.to(tl.float32) * sin.to(tl.float32)).to(DTYPE)
    return (left.to(tl.float32) + right.to(tl.float32)).to(DTYPE)


@triton.jit
def narrowed(numbers, scales, SCALED: tl.constexpr, BY_INSTRUCTION: tl.constexpr):
    """Return the bits of FP8 that stand for numbers."""
    wide = numbers.to(tl.float32)
    if SCALED:
        wide = tl.div_rn(wide, scales)
    if BY_INSTRUCTION:
        return wide.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        return narrow(wide, "fp8_e4m3")


def reference_rope_store(
    qkv: Tensor,
    positions: Tensor,
    out_slots: Tensor,
    rope_table: Tensor,
    kv_layer: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_start: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Do the same by torch operations; keys are rotated in `qkv`, too."""
    tokens = (out_slots >= 0).nonzero()[:, 0]
    slots, page_size, rope_half = out_slots[tokens].long(), kv_layer.shape[2], rope_table.shape[2]
    heads = qkv.view(len(qkv), -1, head_dim)
    states = heads[tokens]
    cos, sin = rope_table[positions[tokens].long()].to(qkv.dtype)[:, :, None].unbind(1)
    turning = states[:, : num_heads + num_kv_heads, rope_start : rope_start + 2 * rope_half]
    first, second = turning.chunk(2, dim=2)
    turning.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2))
    heads[tokens] = states
    new_kv = states[:, num_heads:].reshape(len(tokens), -1, num_kv_heads, head_dim)
    pool = kv_layer
    if kv_layer.dtype == torch.float8_e4m3fn:  # torch indexes no FP8
        scales = torch.tensor([k_scale, v_scale], device=qkv.device)[: kv_layer.shape[1], None, None]
        new_kv = (new_kv.float() / scales).clamp(-448, 448).to(kv_layer.dtype).view(torch.uint8)
        pool = kv_layer.view(torch.uint8)
    pool[slots // page_size, :, slots % page_size] = new_kv.to(pool.dtype)
