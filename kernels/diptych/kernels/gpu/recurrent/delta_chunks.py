"""The gated delta rule behind a short convolution (arXiv 2412.06464), for prompts: chunks of 64 tokens at a time.

Five kernels: channels are convolved, and queries and keys made as long as they should be; the newest inputs are kept;
each chunk by itself solves for what its tokens change in a state (section 3.3 of the paper); `scan_chunks` goes through
the chunks of a head one after the other; what was found is normed and weighed where it lies. Requests of one token are
left to `delta_rule`, so that a token is computed alike in any batch. The host knows how many tokens the longest has,
and nothing else.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.recurrent.chunk_scan import (
    CHUNK,
    PER_REQUEST,
    Chunks,
    Prompts,
    ScanLaunch,
    fading,
    inverse,
    precision,
    prompt_of,
    scan_chunks,
)
from diptych.kernels.gpu.recurrent.delta_rule import UNIT_EPS, DeltaLayer, check_step, softplus
from diptych.kernels.gpu.recurrent.short_conv_prompts import keep_newest


class DeltaLaunch(NamedTuple):
    """How the kernels are launched."""

    conv_tokens: int = 16  # a program
    conv_warps: int = 4
    chunk_warps: int = 4
    norm_warps: int = 4
    scan: ScanLaunch | None = None  # None: as many requests need it


LAUNCH: Final = DeltaLaunch()
NARROWEST: Final = 64  # columns of a product: of 16, Triton 3.6 reads behind what it has in shared memory


def mix_prompts(
    layer: DeltaLayer,
    projected: Tensor,
    newest: Tensor,
    kept: Tensor,
    prompts: Prompts,
    out: Tensor,
    launch: DeltaLaunch = LAUNCH,
) -> None:
    """Mix the tokens of all requests that have several with their states; see `mix_single_tokens`."""
    check_step(layer, projected, newest, kept, prompts.slots, out)
    prompts.check()
    with torch.cuda.device_of(out):
        channels = convolve(layer, projected, newest, prompts, launch)
        chunks = prepare(layer, projected, channels, prompts, launch)
        found = out.view(-1, layer.num_value_heads, layer.value_dim)
        scan_chunks(chunks, kept, (layer.value_dim, 1), prompts, found, launch.scan)
        norm_and_gate_kernel[(cdiv(prompts.max_len, CHUNK), prompts.num_requests, layer.num_value_heads)](
            *(projected, layer.norm, *prompts.on_device, out, layer.eps),
            **norm_constants(layer),
            num_warps=launch.norm_warps,
        )


def convolve(layer: DeltaLayer, projected: Tensor, newest: Tensor, prompts: Prompts, launch: DeltaLaunch) -> Tensor:
    """Return `[num_tokens, num_channels]`; bring `newest` up to date."""
    channels = projected.new_empty(len(projected), layer.num_channels)
    heads = 2 * layer.num_key_heads + layer.num_value_heads
    convolve_prompts_kernel[(cdiv(prompts.max_len, launch.conv_tokens), prompts.num_requests, heads)](
        *(projected, newest, newest.stride(0), layer.conv, *prompts.on_device, channels, layer.key_dim**-0.5),
        **conv_constants(layer),
        TOKENS=launch.conv_tokens,
        num_warps=launch.conv_warps,
    )
    keep_newest(projected, newest, prompts)
    return channels


def prepare(layer: DeltaLayer, projected: Tensor, channels: Tensor, prompts: Prompts, launch: DeltaLaunch) -> Chunks:
    """Let all chunks find what they can by themselves."""
    num_tokens, heads, size = len(projected), layer.num_value_heads, layer.num_key_heads * layer.key_dim
    chunks = Chunks(
        queries=channels[:, :size].view(num_tokens, layer.num_key_heads, layer.key_dim),
        keys=channels[:, size : 2 * size].view(num_tokens, layer.num_key_heads, layer.key_dim),
        corrections=projected.new_empty(num_tokens, heads, layer.key_dim),
        changes=projected.new_empty(num_tokens, heads, layer.value_dim),
        scores=projected.new_empty(num_tokens, heads, CHUNK),
        totals=projected.new_empty(num_tokens, heads, dtype=torch.float32),
    )
    prepare_chunks_kernel[(cdiv(prompts.max_len, CHUNK), prompts.num_requests, heads)](
        *(projected, channels, layer.decay, layer.decay_bias, *prompts.on_device),
        *(chunks.corrections, chunks.changes, chunks.scores, chunks.totals),
        **chunk_constants(layer),
        PRECISION=precision(projected.dtype),
        num_warps=launch.chunk_warps,
    )
    return chunks


def conv_constants(layer: DeltaLayer) -> dict[str, Any]:
    names = ("NUM_KEY_HEADS", "KEY_DIM", "VALUE_DIM")
    sizes = {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "WIDTH": layer.conv.shape[1]}
    return (
        {name: layer.constants[name] for name in names}
        | sizes
        | {"TILE": power_of_two(max(layer.key_dim, layer.value_dim))}
    )


def chunk_constants(layer: DeltaLayer) -> dict[str, Any]:
    sizes = {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "CHUNK": CHUNK}
    tiles = {name: max(NARROWEST, layer.constants[name]) for name in ("KEYS", "VALUES")}
    return layer.constants | sizes | tiles


def norm_constants(layer: DeltaLayer) -> dict[str, Any]:
    names = ("NUM_VALUE_HEADS", "VALUE_DIM", "VALUES")
    constants = {name: layer.constants[name] for name in names}
    return constants | {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "CHUNK": CHUNK}


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def convolve_prompts_kernel(
    projected,
    newest,
    newest_stride,  # from slot to slot
    conv,
    slots,
    starts,
    first_request,
    out,
    scale,  # of queries
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Convolve a head's query, key or value of some tokens: heads of queries come first, those of values last."""
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * TOKENS
    if first < length:
        head, at = tl.program_id(2), first + tl.arange(0, TOKENS)[:, None]
        of_value = head - 2 * NUM_KEY_HEADS
        is_value = of_value >= 0
        begin = tl.where(is_value, 2 * NUM_KEY_HEADS * KEY_DIM + of_value * VALUE_DIM, head * KEY_DIM)
        number = tl.arange(0, TILE)[None, :]
        has_channel = number < tl.where(is_value, VALUE_DIM, KEY_DIM)
        channel = begin + number
        total = tl.zeros((TOKENS, TILE), tl.float32)
        if first < WIDTH - 1:  # sums are in the order of the text
            for tap in tl.static_range(WIDTH - 1):
                token = at - (WIDTH - 1 - tap)
                old = newest + slot * newest_stride + (channel + 1) * (WIDTH - 1) + token
                before = tl.load(old, mask=has_channel & (token < 0), other=0.0)
                weight = tl.load(conv + channel * WIDTH + tap, mask=has_channel, other=0.0)
                total += before.to(tl.float32) * weight.to(tl.float32)
        for tap in tl.static_range(WIDTH):
            token = at - (WIDTH - 1 - tap)
            places = projected + (start + token) * TOKEN + channel
            given = tl.load(places, mask=has_channel & (token >= 0) & (token < length), other=0.0)
            weight = tl.load(conv + channel * WIDTH + tap, mask=has_channel, other=0.0)
            total += given.to(tl.float32) * weight.to(tl.float32)
        activated = total / (1.0 + tl.exp(-total))
        if head < 2 * NUM_KEY_HEADS:
            factor = tl.rsqrt(tl.sum(activated * activated, axis=1) + UNIT_EPS)
            activated *= (factor * tl.where(head < NUM_KEY_HEADS, scale, 1.0))[:, None]
        places = out + (start + at) * CHANNELS + channel
        tl.store(places, activated.to(out.dtype.element_ty), mask=has_channel & (at < length))


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def prepare_chunks_kernel(
    projected,
    channels,
    decay,
    decay_bias,
    slots,
    starts,
    first_request,
    corrections,
    changes,
    scores,
    totals,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        head, row = tl.program_id(2), tl.arange(0, CHUNK)
        is_token = first + row < length
        token = start + first + row
        of_head = token * NUM_VALUE_HEADS + head

        betas = projected + token * TOKEN + CHANNELS + NUM_VALUE_HEADS * VALUE_DIM + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(betas, mask=is_token, other=0.0).to(tl.float32)))
        beta = tl.where(is_token, beta, 0.0)
        x = tl.load(betas + NUM_VALUE_HEADS, mask=is_token, other=0.0).to(tl.float32) + tl.load(decay_bias + head)
        total = tl.cumsum(tl.where(is_token, tl.load(decay + head) * softplus(x), 0.0), axis=0)
        tl.store(totals + of_head, total, mask=is_token)
        remains = fading(total, CHUNK)

        at, column = tl.arange(0, KEYS)[None, :], tl.arange(0, VALUES)[None, :]
        has_key, has_value = is_token[:, None] & (at < KEY_DIM), is_token[:, None] & (column < VALUE_DIM)
        place = channels + token[:, None] * CHANNELS + head // (NUM_VALUE_HEADS // NUM_KEY_HEADS) * KEY_DIM + at
        query = tl.load(place, mask=has_key, other=0.0)
        key = tl.load(place + NUM_KEY_HEADS * KEY_DIM, mask=has_key, other=0.0)
        meets = tl.dot(query, tl.trans(key), input_precision=PRECISION) * remains
        place = scores + of_head[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        tl.store(place, meets.to(scores.dtype.element_ty), mask=is_token[:, None])

        system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * remains * beta[:, None]
        solved = inverse(system, CHUNK, PRECISION) * beta[None, :]
        place = channels + token[:, None] * CHANNELS + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        value = tl.load(place, mask=has_value, other=0.0)
        change = tl.dot(solved.to(value.dtype), value, input_precision=PRECISION)
        tl.store(changes + of_head[:, None] * VALUE_DIM + column, change.to(value.dtype), mask=has_value)
        faded = (solved * tl.exp(total)[None, :]).to(key.dtype)
        lacks = tl.dot(faded, key, input_precision=PRECISION)
        tl.store(corrections + of_head[:, None] * KEY_DIM + at, lacks.to(key.dtype), mask=has_key)


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def norm_and_gate_kernel(
    projected,
    norm,
    slots,
    starts,
    first_request,
    out,
    eps,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        head, at = tl.program_id(2), first + tl.arange(0, CHUNK)[:, None]
        column = tl.arange(0, VALUES)[None, :]
        inside = (at < length) & (column < VALUE_DIM)
        of_values = ((start + at) * NUM_VALUE_HEADS + head) * VALUE_DIM + column
        values = tl.load(out + of_values, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(norm + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
        gates = projected + (start + at) * TOKEN + CHANNELS + head * VALUE_DIM + column
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, axis=1) / VALUE_DIM + eps)[:, None] * weights
        values *= gate / (1.0 + tl.exp(-gate))
        tl.store(out + of_values, values.to(out.dtype.element_ty), mask=inside)
