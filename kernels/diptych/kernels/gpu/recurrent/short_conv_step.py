"""A token, or a row of a few, of a short causal convolution of each of several requests, with their newest inputs.

Sums are in float32 and in the order of the text, as those of the torch reference
(`diptych.engine.models.layers.recurrent.short_conv`). Who has which rows says `slot_rows`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.recurrent.slot_rows import PER_STEP, row_of
from diptych.kernels.slot_rows import SlotRows

TILE: Final = 512  # channels of a program


def short_conv_step(x: Tensor, state: Tensor, rows: SlotRows, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Convolve `x`, `[num_tokens, num_channels]`, with `state`, in place; `out` is float32 of the shape of `x`.

    `state` `[num_slots, num_channels, width - 1]`, of the dtype of `x`, may have gaps between its slots; `weight`
    float32 `[num_channels, width]`, `bias` float32 `[num_channels]`. Runs on the current stream and can be part of a
    CUDA graph.
    """
    num_tokens, num_channels = x.shape
    width = weight.shape[1]
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    assert (out.shape, out.dtype) == (x.shape, torch.float32), (out.shape, out.dtype)
    assert state.shape[1:] == (num_channels, width - 1), (state.shape, weight.shape)
    assert state.stride()[1:] == (width - 1, 1), state.stride()
    assert state.dtype == x.dtype, (state.dtype, x.dtype)
    rows.check(num_tokens)
    assert weight.dtype == torch.float32, weight.dtype
    assert weight.is_contiguous(), weight.stride()
    with torch.cuda.device_of(x):
        short_conv_step_kernel[(num_tokens, cdiv(num_channels, TILE))](
            x,
            state,
            *rows,
            weight,
            weight if bias is None else bias,
            out,
            state.stride(0),
            CHANNELS=num_channels,
            WIDTH=width,
            HAS_BIAS=bias is not None,
            TILE=TILE,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize_on_alignment=PER_STEP)
def short_conv_step_kernel(
    x,
    state,
    slots,
    lens,
    weight,
    bias,
    out,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, length = row_of(slots, lens, row)
    if length != 0:
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = channel < CHANNELS
        old, factors = state + slot * slot_stride + channel * (WIDTH - 1), weight + channel * WIDTH
        first = x + row * CHANNELS + channel
        for i in range(tl.abs(length)):
            total = tl.zeros([TILE], tl.float32)
            for tap in tl.static_range(WIDTH):
                value = input_at(first, old, i - (WIDTH - 1) + tap, inside, CHANNELS, WIDTH)
                total += value.to(tl.float32) * tl.load(factors + tap, mask=inside, other=0.0)
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=inside, other=0.0)
            tl.store(out + (row + i) * CHANNELS + channel, total, mask=inside)
        if length > 0:
            keep_inputs(first, old, length, inside, CHANNELS, WIDTH)


@triton.jit
def input_at(first, old, place, inside, TOKEN: tl.constexpr, WIDTH: tl.constexpr):
    """Return the inputs of the token in a `place` of a row, which begins at `first`; those before it are `old`."""
    before = tl.load(old + (WIDTH - 1) + place, mask=inside & (place < 0), other=0.0)
    given = tl.load(first + place * TOKEN, mask=inside & (place >= 0), other=0.0)
    return tl.where(place < 0, before, given)


@triton.jit
def keep_inputs(first, old, length, inside, TOKEN: tl.constexpr, WIDTH: tl.constexpr):
    """Bring what is kept of the newest inputs up to date: what is read of it lies behind what was written."""
    tl.debug_barrier()  # other threads may have read it
    for tap in tl.static_range(WIDTH - 1):
        tl.store(old + tap, input_at(first, old, length - (WIDTH - 1) + tap, inside, TOKEN, WIDTH), mask=inside)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))`; from 20 on it is `x`."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
