"""A token, or a row of a few, of Kimi's delta rule of each of several requests, whose states are in slots of a pool.

A program has some value dimensions of a head, and of its state the columns that belong to them: these stay in registers
between decay, look-up, correction and reading, so a state is read and written once. The torch reference is
`diptych.engine.models.layers.recurrent.kimi_delta_rule`. Who has which rows says `slot_rows`.
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

TILE: Final = 8192  # numbers of a state that a program has, at most: 64 columns of 128 rows; see bench/results/gpu.md


def kimi_delta_step(
    mixed: Tensor, decays: Tensor, betas: Tensor, rate: Tensor, bias: Tensor, state: Tensor, rows: SlotRows, out: Tensor
) -> None:
    """Compute `out`, float32 `[num_tokens, num_heads, head_dim]`, and bring `state` up to date.

    `mixed` is float32 `[num_tokens, num_heads, 3 * head_dim]`, a head's query, key and value before SiLU; `decays`
    `[num_tokens, num_heads, head_dim]` and `betas` `[num_tokens, num_heads]` may have gaps between their rows;
    `rate` is float32 `[num_heads]`, `bias` float32 `[num_heads, head_dim]`. `state` is float32 `[num_slots, num_heads,
    head_dim, head_dim]`, with any gaps between slots. Runs on the current stream and can be part of a CUDA graph.
    """
    num_tokens, num_heads, head_dim = out.shape
    assert mixed.shape == (num_tokens, num_heads, 3 * head_dim), mixed.shape
    assert mixed.dtype == out.dtype == state.dtype == torch.float32, (mixed.dtype, out.dtype, state.dtype)
    assert all(each.is_contiguous() for each in (mixed, rate, bias, out))
    assert decays.shape == out.shape, decays.shape
    assert decays.stride()[1:] == (head_dim, 1), decays.stride()
    assert betas.shape == (num_tokens, num_heads), betas.shape
    assert betas.stride(1) == 1, betas.stride()
    assert state.shape[1:] == (num_heads, head_dim, head_dim), state.shape
    assert state.stride()[1:] == (head_dim * head_dim, head_dim, 1), state.stride()
    rows.check(num_tokens)
    keys = power_of_two(head_dim)
    values = min(keys, max(1, TILE // keys))
    with torch.cuda.device_of(out):
        kimi_delta_step_kernel[(num_tokens, num_heads, cdiv(head_dim, values))](
            mixed,
            decays,
            betas,
            rate,
            bias,
            state,
            *rows,
            out,
            decays.stride(0),
            betas.stride(0),
            state.stride(0),
            NUM_HEADS=num_heads,
            DIM=head_dim,
            KEYS=keys,
            VALUES=values,
        )


@triton.jit(do_not_specialize_on_alignment=PER_STEP)
def kimi_delta_step_kernel(
    mixed,
    decays,
    betas,
    rate,
    bias,
    state,
    slots,
    lens,
    out,
    decay_stride,
    beta_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,  # DIM as a power of two
    VALUES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, length = row_of(slots, lens, row)
    if length != 0:
        key_dim, value_dim = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        is_key, is_value = key_dim < DIM, value_dim < DIM
        inside = is_key[:, None] & is_value[None, :]
        place = state + slot * slot_stride + head * (DIM * DIM) + key_dim[:, None] * DIM + value_dim[None, :]
        kept = tl.load(place, mask=inside, other=0.0)
        for i in range(tl.abs(length)):
            token = row + i
            given = mixed + (token * NUM_HEADS + head) * (3 * DIM)
            query = _normed(silu(tl.load(given + key_dim, mask=is_key, other=0.0))) * (DIM**-0.5)
            key = _normed(silu(tl.load(given + DIM + key_dim, mask=is_key, other=0.0)))
            value = silu(tl.load(given + 2 * DIM + value_dim, mask=is_value, other=0.0))
            beta = tl.load(betas + token * beta_stride + head).to(tl.float32)
            decay = tl.load(decays + token * decay_stride + head * DIM + key_dim, mask=is_key, other=0.0)
            widened = decay.to(tl.float32) + tl.load(bias + head * DIM + key_dim, mask=is_key, other=0.0)
            kept *= tl.exp(-tl.load(rate + head) * softplus(widened))[:, None]
            found = tl.sum(kept * key[:, None], axis=0)
            kept += key[:, None] * ((value - found) / (1.0 + tl.exp(-beta)))[None, :]
            read = tl.sum(kept * query[:, None], axis=0)
            tl.store(out + (token * NUM_HEADS + head) * DIM + value_dim, read, mask=is_value)
        if length > 0:
            tl.store(place, kept, mask=inside)


@triton.jit
def _normed(x):
    return x / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)
