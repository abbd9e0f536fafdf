"""One token of a short causal convolution of each of several requests, whose newest inputs are in slots of a pool.

Sums are in float32 and in the order of the text, as those of the torch reference
(`diptych.engine.models.layers.recurrent.short_conv`). A slot of -1 is nobody's: nothing of its row is read or written.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv

TILE: Final = 512  # channels of a program


def short_conv_step(x: Tensor, state: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Convolve `x`, `[num_requests, num_channels]`, with `state`, in place; `out` is float32 of the shape of `x`.

    `state` `[num_slots, num_channels, width - 1]`, of the dtype of `x`, may have gaps between its slots; `slots`
    `[num_requests]`; `weight` float32 `[num_channels, width]`, `bias` float32 `[num_channels]`. Runs on the current
    stream and can be part of a CUDA graph.
    """
    num_requests, num_channels = x.shape
    width = weight.shape[1]
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    assert (out.shape, out.dtype) == (x.shape, torch.float32), (out.shape, out.dtype)
    assert state.shape[1:] == (num_channels, width - 1), (state.shape, weight.shape)
    assert state.stride()[1:] == (width - 1, 1), state.stride()
    assert state.dtype == x.dtype, (state.dtype, x.dtype)
    assert slots.shape == (num_requests,), slots.shape
    assert weight.dtype == torch.float32, weight.dtype
    assert weight.is_contiguous(), weight.stride()
    with torch.cuda.device_of(x):
        short_conv_step_kernel[(num_requests, cdiv(num_channels, TILE))](
            x,
            state,
            slots,
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


@triton.jit(do_not_specialize_on_alignment=["slots"])  # part of what was staged for a step
def short_conv_step_kernel(
    x,
    state,
    slots,
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
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    kept, factors = state + slot * slot_stride + channel * (WIDTH - 1), weight + channel * WIDTH
    newest = tl.load(x + row * CHANNELS + channel, mask=inside, other=0.0)
    total = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(WIDTH - 1):
        tap = tl.load(kept + i, mask=inside, other=0.0)
        total += tap.to(tl.float32) * tl.load(factors + i, mask=inside, other=0.0)
        if i > 0:
            tl.store(kept + i - 1, tap, mask=inside)
    tl.store(kept + WIDTH - 2, newest, mask=inside)
    total += newest.to(tl.float32) * tl.load(factors + WIDTH - 1, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    tl.store(out + row * CHANNELS + channel, total, mask=inside)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))`; from 20 on it is `x`."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
