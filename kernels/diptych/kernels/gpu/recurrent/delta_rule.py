"""The gated delta rule behind a short convolution (arXiv 2412.06464), for requests with a token, or a row of a few.

Two kernels: the first convolves each channel with the request's newest inputs; the second has a part of a value head's
state in registers, lets it fade, and corrects it, token by token, so that a state is read and written once; then it
norms and weighs what queries have found. What decides lies on the device: who has which rows says `slot_rows`.
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
from diptych.kernels.gpu.recurrent.short_conv_step import input_at, keep_inputs
from diptych.kernels.gpu.recurrent.slot_rows import row_of
from diptych.kernels.slot_rows import SlotRows

CHANNELS_TILE: Final = 128
PARTS: Final = 2  # of a state, whose columns change by themselves: several programs have theirs in a multiprocessor
NUMBERS_A_WARP: Final = 2048  # of a part: 64 a thread
PER_ROW: Final = (*PER_REQUEST, "lens")
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
    rows: SlotRows,
    starts: Tensor,
    out: Tensor,
) -> None:
    """Mix the tokens of rows with the states of their requests, and bring those up to date, in place.

    `projected`: `[num_tokens, channels | gates | numbers of beta | of g]`; `newest`: `[num_slots, num_channels,
    conv_width - 1]`; `kept`: float32 `[num_slots, num_value_heads, key_dim, value_dim]`, each slot dense; `out`:
    `[num_tokens, num_value_heads * value_dim]`. `starts`, int32 `[batch_size + 1]`, says where each of `rows` has its
    token: a prompt, which has several, is left alone.
    """
    check_step(layer, projected, newest, kept, rows.slots, out)
    rows.check(len(starts) - 1)
    mixed = projected.new_empty(len(rows.slots), layer.num_channels)
    found = torch.empty(len(mixed), layer.num_value_heads, layer.value_dim, dtype=torch.float32, device=out.device)
    sizes = {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels}
    width = layer.conv.shape[1]
    with torch.cuda.device_of(out):
        convolve_single_kernel[(len(mixed), cdiv(layer.num_channels, CHANNELS_TILE))](
            *(projected, newest, newest.stride(0), layer.conv, *rows, starts, mixed),
            **sizes,
            WIDTH=width,
            TILE=CHANNELS_TILE,
        )
        delta_single_kernel[(len(mixed), layer.num_value_heads)](
            mixed,
            projected,
            kept,
            kept.stride(0),
            layer.decay,
            layer.decay_bias,
            layer.norm,
            *rows,
            starts,
            found,
            out,
            layer.key_dim**-0.5,
            layer.eps,
            **sizes,
            **layer.constants,
            PARTS=PARTS,
            num_warps=warps(layer),
        )


def warps(layer: DeltaLayer) -> int:
    """How many warps share a part of a state."""
    numbers = layer.constants["KEYS"] * layer.constants["VALUES"] // PARTS
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
def single_token(slots, lens, starts, request):
    """Return a row's first token, its slot, and its length, which is 0 where there is nothing to do."""
    slot, length = row_of(slots, lens, request)
    token = tl.load(starts + request).to(tl.int64)
    return token, slot, tl.where(tl.load(starts + request + 1) - token == 1, length, 0)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def convolve_single_kernel(
    projected,
    newest,
    newest_stride,  # from slot to slot
    conv,
    slots,
    lens,
    starts,
    mixed,  # [batch_size, CHANNELS]
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, slot, length = single_token(slots, lens, starts, row)
    if length != 0:
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = channel < CHANNELS
        first, old = projected + token * TOKEN + channel, newest + slot * newest_stride + channel * (WIDTH - 1)
        for i in range(tl.abs(length)):
            total = tl.zeros([TILE], tl.float32)
            for tap in tl.static_range(WIDTH):
                value = input_at(first, old, i - (WIDTH - 1) + tap, inside, TOKEN, WIDTH)
                factor = tl.load(conv + channel * WIDTH + tap, mask=inside, other=0.0)
                total += value.to(tl.float32) * factor.to(tl.float32)
            silu = (total / (1.0 + tl.exp(-total))).to(mixed.dtype.element_ty)
            tl.store(mixed + (row + i) * CHANNELS + channel, silu, mask=inside)
        if length > 0:
            keep_inputs(first, old, length, inside, TOKEN, WIDTH)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def delta_single_kernel(
    mixed,
    projected,
    kept,
    kept_stride,  # from slot to slot
    decay,
    decay_bias,
    norm,
    slots,
    lens,
    starts,
    found,  # float32 [batch_size, NUM_VALUE_HEADS, VALUE_DIM]
    out,
    scale,
    eps,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, slot, length = single_token(slots, lens, starts, row)
    if length != 0:
        head, at = tl.program_id(1), tl.arange(0, KEYS)
        key_head, is_key = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS), at < KEY_DIM
        states = kept + slot * kept_stride + head * (KEY_DIM * VALUE_DIM) + at[:, None] * VALUE_DIM
        of_head, num_tokens = found + (row * NUM_VALUE_HEADS + head) * VALUE_DIM, tl.abs(length)
        for part in tl.static_range(PARTS):
            column = part * (VALUES // PARTS) + tl.arange(0, VALUES // PARTS)
            is_value = column < VALUE_DIM
            inside = is_key[:, None] & is_value[None, :]
            state = tl.load(states + column[None, :], mask=inside, other=0.0)
            for i in range(num_tokens):
                channels = mixed + (row + i) * CHANNELS
                queries = channels + key_head * KEY_DIM + at
                query = tl.load(queries, mask=is_key, other=0.0).to(tl.float32)
                key = tl.load(queries + NUM_KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
                query *= scale * tl.rsqrt(tl.sum(query * query, axis=0) + UNIT_EPS)
                key *= tl.rsqrt(tl.sum(key * key, axis=0) + UNIT_EPS)
                betas = projected + (token + i) * TOKEN + CHANNELS + NUM_VALUE_HEADS * VALUE_DIM + head
                beta, g = learning(betas, decay + head, decay_bias + head, NUM_VALUE_HEADS)
                values = channels + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
                value = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
                state *= tl.exp(g)
                change = beta * (value - tl.sum(state * key[:, None], axis=0))
                state += key[:, None] * change[None, :]
                result = tl.sum(state * query[:, None], axis=0)
                tl.store(of_head + i * (NUM_VALUE_HEADS * VALUE_DIM) + column, result, mask=is_value)
            if length > 0:
                tl.store(states + column[None, :], state, mask=inside)
        tl.debug_barrier()  # what other threads have found is read
        column = tl.arange(0, VALUES)
        is_value = column < VALUE_DIM
        for i in range(num_tokens):
            result = tl.load(of_head + i * (NUM_VALUE_HEADS * VALUE_DIM) + column, mask=is_value, other=0.0)
            result *= tl.rsqrt(tl.sum(result * result, axis=0) / VALUE_DIM + eps)
            gates = projected + (token + i) * TOKEN + CHANNELS + head * VALUE_DIM + column
            weigh(
                result,
                norm + column,
                gates,
                out + ((token + i) * NUM_VALUE_HEADS + head) * VALUE_DIM + column,
                is_value,
            )


@triton.jit
def weigh(normed, norm, gates, places, inside):
    """Store what was found, by the norm's weights and its gates."""
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    weighed = normed * tl.load(norm, mask=inside, other=0.0).to(tl.float32) * gate / (1.0 + tl.exp(-gate))
    tl.store(places, weighed.to(places.dtype.element_ty), mask=inside)


@triton.jit
def learning(betas, decay, decay_bias, NUM_VALUE_HEADS: tl.constexpr):
    """Return how far a head corrects itself, and the logarithm of what remains of its state."""
    beta = 1.0 / (1.0 + tl.exp(-tl.load(betas).to(tl.float32)))
    x = tl.load(betas + NUM_VALUE_HEADS).to(tl.float32) + tl.load(decay_bias)
    return beta, tl.load(decay) * softplus(x)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
