"""The gated delta rule behind a short convolution (arXiv 2412.06464), for requests that have one new token each.

Two kernels: the first convolves each channel with the request's newest inputs, in place; the second has a value head's
state in registers, lets it fade, corrects it, and norms and weighs what the query finds, so that a state is read and
written once. What decides lies on the device: which slot a row has, and whether it has one. A row whose slot is -1
reads and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.recurrent.chunk_scan import PER_REQUEST

CHANNELS_TILE: Final = 512
NUMBERS_A_WARP: Final = 2048  # of half a state: 64 a thread
UNIT_EPS: Final = tl.constexpr(1e-6)  # added to the square of the length of a query, or key


@dataclass(frozen=True, slots=True, eq=False)
class DeltaLayer:
    """A layer's shape, and what it has beside its matrices."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [num_channels, conv_width], the newest token's last
    decay: Tensor  # float32 [num_value_heads]: below 0
    decay_bias: Tensor  # float32 [num_value_heads]
    norm: Tensor  # [value_dim]
    eps: float

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def token_size(self) -> int:
        """The numbers of a token in `projected`: channels, gates, those of beta, those of g."""
        return self.num_channels + self.num_value_heads * (self.value_dim + 2)

    @property
    def constants(self) -> dict[str, int]:
        """What all kernels of prompts and of single tokens have in common."""
        return {
            "NUM_KEY_HEADS": self.num_key_heads,
            "NUM_VALUE_HEADS": self.num_value_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "KEYS": max(16, power_of_two(self.key_dim)),
            "VALUES": max(32, power_of_two(self.value_dim)),
        }


def mix_single_tokens(
    layer: DeltaLayer,
    projected: Tensor,
    newest: Tensor,
    kept: Tensor,
    slots: Tensor,
    out: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Mix the only new token of each request with its states, and bring those up to date, in place.

    `projected`: `[num_tokens, channels | gates | numbers of beta | of g]`, whose channels are overwritten; `newest`:
    `[num_slots, num_channels, conv_width - 1]`; `kept`: float32 `[num_slots, num_value_heads, key_dim, value_dim]`,
    each slot dense; `out`: `[num_tokens, num_value_heads * value_dim]`. `slots`: int64 `[batch_size]`, -1: none. With
    `starts`, int32 `[batch_size + 1]`, each request's first token, those that have another number of tokens are left
    alone.
    """
    check_step(layer, projected, newest, kept, slots, out)
    assert starts is not None or len(projected) == len(slots), (projected.shape, slots.shape)
    sizes = {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "HAS_STARTS": starts is not None}
    width = layer.conv.shape[1]
    with torch.cuda.device_of(out):
        convolve_single_kernel[(len(slots), cdiv(layer.num_channels, CHANNELS_TILE))](
            projected, newest, newest.stride(0), layer.conv, slots, starts, **sizes, WIDTH=width, TILE=CHANNELS_TILE
        )
        delta_single_kernel[(len(slots), layer.num_value_heads)](
            projected,
            kept,
            kept.stride(0),
            layer.decay,
            layer.decay_bias,
            layer.norm,
            slots,
            starts,
            out,
            layer.key_dim**-0.5,
            layer.eps,
            **sizes,
            **layer.constants,
            num_warps=warps(layer),
        )


def warps(layer: DeltaLayer) -> int:
    """How many warps share half of a state."""
    numbers = layer.constants["KEYS"] * layer.constants["VALUES"] // 2
    return min(8, max(1, numbers // NUMBERS_A_WARP))


def check_step(layer: DeltaLayer, projected: Tensor, newest: Tensor, kept: Tensor, slots: Tensor, out: Tensor) -> None:
    """Assert that a step has the shapes and types that the kernels take for granted."""
    width, heads = layer.conv.shape[1], layer.num_value_heads
    assert projected.shape == (len(out), layer.token_size), (projected.shape, out.shape)
    assert out.shape[1] == heads * layer.value_dim, out.shape
    assert newest.shape[1:] == (layer.num_channels, width - 1), newest.shape
    assert kept.shape[1:] == (heads, layer.key_dim, layer.value_dim), kept.shape
    assert (kept.dtype, slots.dtype) == (torch.float32, torch.int64), (kept.dtype, slots.dtype)
    assert projected.dtype == newest.dtype == out.dtype, (projected.dtype, newest.dtype, out.dtype)
    assert all(each.is_contiguous() for each in (projected, newest[0], kept[0], slots, out, layer.conv))


@triton.jit
def single_token(slots, starts, request, HAS_STARTS: tl.constexpr):
    """Return a request's token and slot, which is -1 where there is nothing to do."""
    slot = tl.load(slots + request)
    token = request.to(tl.int64)
    if HAS_STARTS:
        token = tl.load(starts + request).to(tl.int64)
        slot = tl.where(tl.load(starts + request + 1) - token == 1, slot, -1)
    return token, slot


@triton.jit(do_not_specialize_on_alignment=PER_REQUEST)
def convolve_single_kernel(
    projected,
    newest,
    newest_stride,  # from slot to slot
    conv,
    slots,
    starts,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    token, slot = single_token(slots, starts, tl.program_id(0), HAS_STARTS)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (channel < CHANNELS) & (slot >= 0)
    place = projected + token * TOKEN + channel
    old = newest + slot * newest_stride + channel * (WIDTH - 1)
    given = tl.load(place, mask=inside, other=0.0)
    total = given.to(tl.float32) * tl.load(conv + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        value = tl.load(old + tap, mask=inside, other=0.0)
        weight = tl.load(conv + channel * WIDTH + tap, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            tl.store(old + tap - 1, value, mask=inside)
    tl.store(old + WIDTH - 2, given, mask=inside)
    tl.store(place, (total / (1.0 + tl.exp(-total))).to(given.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=PER_REQUEST)
def delta_single_kernel(
    projected,
    kept,
    kept_stride,  # from slot to slot
    decay,
    decay_bias,
    norm,
    slots,
    starts,
    out,
    scale,
    eps,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    token, slot = single_token(slots, starts, tl.program_id(0), HAS_STARTS)
    if slot >= 0:
        head, row, at = tl.program_id(1), projected + token * TOKEN, tl.arange(0, KEYS)
        key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
        query = tl.load(row + key_head * KEY_DIM + at, mask=at < KEY_DIM, other=0.0).to(tl.float32)
        key = tl.load(row + (NUM_KEY_HEADS + key_head) * KEY_DIM + at, mask=at < KEY_DIM, other=0.0).to(tl.float32)
        query *= scale * tl.rsqrt(tl.sum(query * query, axis=0) + UNIT_EPS)
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + UNIT_EPS)
        betas = row + CHANNELS + NUM_VALUE_HEADS * VALUE_DIM + head
        beta, g = learning(betas, decay + head, decay_bias + head, NUM_VALUE_HEADS)
        values = row + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
        states = kept + slot * kept_stride + head * (KEY_DIM * VALUE_DIM)
        half: tl.constexpr = VALUES // 2  # so that two programs, and more, have their states in a multiprocessor
        low = correct(states, values, key, query, g, beta, 0, half, KEYS, KEY_DIM, VALUE_DIM)
        high = correct(states, values, key, query, g, beta, half, half, KEYS, KEY_DIM, VALUE_DIM)
        factor = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / VALUE_DIM + eps)
        gates, places = row + CHANNELS + head * VALUE_DIM, out + (token * NUM_VALUE_HEADS + head) * VALUE_DIM
        weigh(low * factor, norm, gates, places, 0, half, VALUE_DIM)
        weigh(high * factor, norm, gates, places, half, half, VALUE_DIM)


@triton.jit
def correct(
    states,
    values,
    key,
    query,
    g,
    beta,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Bring some columns of a state up to date, which change by themselves; return what the query finds in them."""
    at, column = tl.arange(0, KEYS)[:, None], FIRST + tl.arange(0, COLUMNS)
    inside = (at < KEY_DIM) & (column[None, :] < VALUE_DIM)
    place = states + at * VALUE_DIM + column[None, :]
    state = tl.load(place, mask=inside, other=0.0) * tl.exp(g)
    value = tl.load(values + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
    change = beta * (value - tl.sum(state * key[:, None], axis=0))
    state += key[:, None] * change[None, :]
    tl.store(place, state, mask=inside)
    return tl.sum(state * query[:, None], axis=0)


@triton.jit
def weigh(normed, norm, gates, places, FIRST: tl.constexpr, COLUMNS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store what was found, by the norm's weights and its gates."""
    column = FIRST + tl.arange(0, COLUMNS)
    inside = column < VALUE_DIM
    gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
    weighed = normed * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32) * gate / (1.0 + tl.exp(-gate))
    tl.store(places + column, weighed.to(places.dtype.element_ty), mask=inside)


@triton.jit
def learning(betas, decay, decay_bias, NUM_VALUE_HEADS: tl.constexpr):
    """Return how far a head corrects itself, and the logarithm of what remains of its state."""
    beta = 1.0 / (1.0 + tl.exp(-tl.load(betas).to(tl.float32)))
    x = tl.load(betas + NUM_VALUE_HEADS).to(tl.float32) + tl.load(decay_bias)
    return beta, tl.load(decay) * softplus(x)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
