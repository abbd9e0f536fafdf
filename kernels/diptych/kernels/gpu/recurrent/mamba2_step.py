"""A token, or a row of a few, of state spaces (Mamba 2) of each of several requests, whose states are in slots.

A program has some dimensions of a head, and the rows of its state that belong to them: these stay in registers between
decay, addition and reading, so a state is read and written once. The torch reference is
`diptych.engine.models.layers.recurrent.mamba2_scan`. Who has which rows says `slot_rows`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.recurrent.short_conv_step import silu, softplus
from diptych.kernels.gpu.recurrent.slot_rows import PER_STEP, row_of
from diptych.kernels.slot_rows import SlotRows

TILE: Final = 4096  # numbers of a state that a program has, at most


def mamba2_step(
    mixed: Tensor,
    steps: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    min_step: float,
    state: Tensor,
    rows: SlotRows,
    out: Tensor,
) -> None:
    """Compute `out`, float32 `[num_tokens, num_heads, head_dim]`, and bring `state` up to date.

    `mixed` is float32 `[num_tokens, num_groups, group_channels]`, before SiLU: of a group its heads, and the vectors
    of `state_size` that it writes and reads with. `steps` `[num_tokens, num_heads]` may have gaps between its rows.
    `rate`, `bias` and `skip` are float32 `[num_groups, heads of a group]`. `state` is float32 `[num_slots, num_heads,
    head_dim, state_size]`, with any gaps between slots. Runs on the current stream and can be part of a CUDA graph.
    """
    num_tokens, num_heads, head_dim = out.shape
    num_groups, state_size = len(rate), state.shape[3]
    channels = num_heads // num_groups * head_dim + 2 * state_size
    assert mixed.shape == (num_tokens, num_groups, channels), mixed.shape
    assert mixed.dtype == out.dtype == state.dtype == torch.float32, (mixed.dtype, out.dtype, state.dtype)
    assert all(each.is_contiguous() for each in (mixed, rate, bias, skip, out))
    assert steps.shape == (num_tokens, num_heads), steps.shape
    assert steps.stride(1) == 1, steps.stride()
    assert state.shape[1:3] == (num_heads, head_dim), state.shape
    assert state.stride()[1:] == (head_dim * state_size, state_size, 1), state.stride()
    rows.check(num_tokens)
    columns = power_of_two(state_size)
    dims = min(power_of_two(head_dim), max(1, TILE // columns))
    with torch.cuda.device_of(out):
        mamba2_step_kernel[(num_tokens, num_heads, cdiv(head_dim, dims))](
            mixed,
            steps,
            rate,
            bias,
            skip,
            state,
            *rows,
            out,
            min_step,
            steps.stride(0),
            state.stride(0),
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_groups,
            DIM=head_dim,
            SIZE=state_size,
            DIMS=dims,
            COLUMNS=columns,
        )


@triton.jit(do_not_specialize_on_alignment=PER_STEP)
def mamba2_step_kernel(
    mixed,
    steps,
    rate,
    bias,
    skip,
    state,
    slots,
    lens,
    out,
    min_step,
    step_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # SIZE as a power of two
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, length = row_of(slots, lens, row)
    if length != 0:
        dim, column = tl.program_id(2) * DIMS + tl.arange(0, DIMS), tl.arange(0, COLUMNS)
        is_dim, is_column = dim < DIM, column < SIZE
        inside = is_dim[:, None] & is_column[None, :]
        place = state + slot * slot_stride + head * (DIM * SIZE) + dim[:, None] * SIZE + column[None, :]
        kept = tl.load(place, mask=inside, other=0.0)
        for i in range(tl.abs(length)):
            token = row + i
            given = mixed + (token * (NUM_HEADS // GROUP) + head // GROUP) * (GROUP * DIM + 2 * SIZE)
            vectors = given + GROUP * DIM + column
            value = silu(tl.load(given + head % GROUP * DIM + dim, mask=is_dim, other=0.0))
            writing = silu(tl.load(vectors, mask=is_column, other=0.0))
            reading = silu(tl.load(vectors + SIZE, mask=is_column, other=0.0))
            raw = tl.load(steps + token * step_stride + head).to(tl.float32) + tl.load(bias + head)
            step = tl.maximum(softplus(raw), min_step)
            kept *= tl.exp(step * tl.load(rate + head))
            kept += (value * step)[:, None] * writing[None, :]
            read = tl.sum(kept * reading[None, :], axis=1) + value * tl.load(skip + head)
            tl.store(out + (token * NUM_HEADS + head) * DIM + dim, read, mask=is_dim)
        if length > 0:
            tl.store(place, kept, mask=inside)
