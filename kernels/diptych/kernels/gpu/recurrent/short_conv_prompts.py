"""Several tokens of a short causal convolution of each of some requests, whose newest inputs are in slots of a pool.

Sums are in float32 and in the order of the text, as those of the torch reference
(`diptych.engine.models.layers.recurrent.short_conv`). Requests of one token are left alone.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.recurrent.chunk_scan import PER_REQUEST, Prompts, prompt_of

TOKENS: Final = 16
TILE: Final = 128  # channels of a program


def short_conv_prompts(
    x: Tensor, state: Tensor, prompts: Prompts, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Convolve `x`, `[num_tokens, num_channels]`, with `state`, in place; `out` is float32 of the shape of `x`.

    `state` `[num_slots, num_channels, width - 1]`, of the dtype of `x`, may have gaps between its slots; `weight`
    float32 `[num_channels, width]`, `bias` float32 `[num_channels]`.
    """
    num_channels, width = weight.shape
    prompts.check()
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    assert (out.shape, out.dtype) == (x.shape, torch.float32), (out.shape, out.dtype)
    assert (weight.dtype, state.dtype) == (torch.float32, x.dtype), (weight.dtype, state.dtype)
    assert state.shape[1:] == (num_channels, width - 1), (state.shape, weight.shape)
    assert weight.is_contiguous(), weight.stride()
    with torch.cuda.device_of(x):
        short_conv_prompts_kernel[(cdiv(prompts.max_len, TOKENS), prompts.num_requests, cdiv(num_channels, TILE))](
            *(x, state, state.stride(0), weight, weight if bias is None else bias, *prompts.on_device, out),
            CHANNELS=num_channels,
            WIDTH=width,
            HAS_BIAS=bias is not None,
            TOKENS=TOKENS,
            TILE=TILE,
            enable_fp_fusion=False,
        )
        keep_newest(x, state, prompts)


def keep_newest(x: Tensor, state: Tensor, prompts: Prompts) -> None:
    """Bring `state`, as above, up to date; `x` `[num_tokens, ...]` has the channels first, and then anything."""
    num_channels, rest = state.shape[1:]
    assert state.stride()[1:] == (rest, 1), state.stride()
    keep_newest_kernel[(prompts.num_requests, cdiv(num_channels, TILE))](
        *(x, state, state.stride(0), *prompts.on_device),
        TOKEN=x.stride(0),
        CHANNELS=num_channels,
        WIDTH=rest + 1,
        TILE=TILE,
    )


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def short_conv_prompts_kernel(
    x,
    state,
    slot_stride,
    weight,
    bias,
    slots,
    starts,
    first_request,
    out,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * TOKENS
    if first < length:
        at, channel = first + tl.arange(0, TOKENS)[:, None], tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
        inside = channel < CHANNELS
        total = tl.zeros((TOKENS, TILE), tl.float32)
        if first < WIDTH - 1:
            for tap in tl.static_range(WIDTH - 1):
                token = at - (WIDTH - 1 - tap)
                old = state + slot * slot_stride + (channel + 1) * (WIDTH - 1) + token
                before = tl.load(old, mask=inside & (token < 0), other=0.0).to(tl.float32)
                total += before * tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
        for tap in tl.static_range(WIDTH):
            token = at - (WIDTH - 1 - tap)
            place = x + (start + token) * CHANNELS + channel
            given = tl.load(place, mask=inside & (token >= 0) & (token < length), other=0.0).to(tl.float32)
            total += given * tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        tl.store(out + (start + at) * CHANNELS + channel, total, mask=inside & (at < length))


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def keep_newest_kernel(
    projected,
    newest,
    newest_stride,  # from slot to slot
    slots,
    starts,
    first_request,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(0))
    if length > 0:
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        has_channel = channel < CHANNELS
        old = newest + slot * newest_stride + channel * (WIDTH - 1)
        for tap in tl.static_range(WIDTH - 1):  # what is read of the old ones lies behind what is written
            token = length - (WIDTH - 1) + tap
            is_new = has_channel & (token >= 0)
            given = tl.load(projected + (start + token) * TOKEN + channel, mask=is_new, other=0.0)
            before = tl.load(old + token + (WIDTH - 1), mask=has_channel & (token < 0), other=0.0)
            tl.store(old + tap, tl.where(is_new, given, before), mask=has_channel)
