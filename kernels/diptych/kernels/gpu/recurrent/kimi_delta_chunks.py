"""The delta rule whose state decays by each channel of its keys (Kimi Linear, arXiv 2510.26692), for prompts.

Three kernels: logarithms of decays are added up in each chunk; each chunk solves for what its tokens change, as those
of the gated delta rule do (arXiv 2412.06464); `scan_chunks` goes through the chunks of a head one after the other. The
torch reference is `diptych.engine.models.layers.recurrent.kimi_delta_rule`. Requests of one token are left alone.

What two tokens have to do with each other decays by channels, so it is no product of matrices by itself. Between the
tokens of two halves of a block it is one: those of the second half have decayed since the first one ended, those of the
first half until then, so no exponential is above 1, however fast a channel decays. Halves of 32 tokens, of 16 and so on
down to 1 have all pairs among them.
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
    inverse,
    precision,
    prompt_of,
    scan_chunks,
)
from diptych.kernels.gpu.recurrent.short_conv_step import silu, softplus

NUM_HALVINGS: Final = CHUNK.bit_length() - 1


class KimiLaunch(NamedTuple):
    """How the kernels are launched."""

    decay_warps: int = 4
    chunk_warps: int = 8
    scan: ScanLaunch | None = None  # None: as many requests need it


LAUNCH: Final = KimiLaunch()


class KimiHeads(NamedTuple):
    """How fast states decay, by the layer."""

    rate: Tensor  # float32 [num_heads]
    bias: Tensor  # float32 [num_heads, head_dim], added to what a token says


def kimi_delta_prompts(
    mixed: Tensor,
    decays: Tensor,
    betas: Tensor,
    heads: KimiHeads,
    state: Tensor,
    prompts: Prompts,
    out: Tensor,
    launch: KimiLaunch = LAUNCH,
) -> None:
    """Compute several tokens of each of some requests: `out`, float32 `[num_tokens, num_heads, head_dim]`.

    `mixed` is float32 `[num_tokens, num_heads, 3 * head_dim]`, a head's query, key and value before SiLU; `decays`
    `[num_tokens, num_heads, head_dim]` and `betas` `[num_tokens, num_heads]` may have gaps between their rows. `state`,
    float32 `[num_slots, num_heads, head_dim, head_dim]`, with any gaps between slots, is brought up to date.
    """
    num_tokens, num_heads, head_dim = out.shape
    prompts.check()
    assert mixed.shape == (num_tokens, num_heads, 3 * head_dim), mixed.shape
    assert mixed.dtype == out.dtype == state.dtype == torch.float32, (mixed.dtype, out.dtype, state.dtype)
    assert decays.stride()[1:] == (head_dim, 1), decays.stride()
    assert betas.stride(1) == 1, betas.stride()
    assert all(each.is_contiguous() for each in (mixed, state[0], heads.rate, heads.bias, out))
    chunks = _allocate(out, decays.dtype)
    grid = cdiv(prompts.max_len, CHUNK), prompts.num_requests, num_heads
    with torch.cuda.device_of(out):
        add_up_decays_kernel[grid](
            *(decays, decays.stride(0), heads.rate, heads.bias, *prompts.on_device, chunks.totals),
            **decay_constants(num_heads, head_dim),
            num_warps=launch.decay_warps,
        )
        prepare_kimi_chunks_kernel[grid](
            *(mixed, betas, betas.stride(0), *prompts.on_device, chunks.totals),
            *(chunks.queries, chunks.keys, chunks.corrections, chunks.changes, chunks.scores, head_dim**-0.5),
            **chunk_constants(num_heads, head_dim, decays.dtype),
            num_warps=launch.chunk_warps,
            num_stages=1,
        )
        scan_chunks(chunks, state, (head_dim, 1), prompts, out, launch.scan)


def _allocate(out: Tensor, dtype: torch.dtype) -> Chunks:
    return Chunks(
        queries=torch.empty_like(out, dtype=dtype),
        keys=torch.empty_like(out, dtype=dtype),
        corrections=torch.empty_like(out, dtype=dtype),
        changes=torch.empty_like(out, dtype=dtype),
        scores=out.new_empty(*out.shape[:2], CHUNK, dtype=dtype),
        totals=torch.empty_like(out),
    )


def decay_constants(num_heads: int, head_dim: int) -> dict[str, Any]:
    return {"NUM_HEADS": num_heads, "DIM": head_dim, "TILE": max(16, power_of_two(head_dim)), "CHUNK": CHUNK}


def chunk_constants(num_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    return decay_constants(num_heads, head_dim) | {"HALVINGS": NUM_HALVINGS, "PRECISION": precision(dtype)}


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def add_up_decays_kernel(
    decays,
    decay_stride,
    rate,
    bias,
    slots,
    starts,
    first_request,
    totals,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        head, row, at = tl.program_id(2), tl.arange(0, CHUNK), tl.arange(0, TILE)
        token, inside = start + first + row, (first + row < length)[:, None] & (at < DIM)[None, :]
        place = decays + token[:, None] * decay_stride + head * DIM + at[None, :]
        raw = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        raw += tl.load(bias + head * DIM + at, mask=at < DIM, other=0.0)[None, :]
        total = tl.cumsum(tl.where(inside, -tl.load(rate + head) * softplus(raw), 0.0), axis=0)
        tl.store(totals + (token[:, None] * NUM_HEADS + head) * DIM + at[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def prepare_kimi_chunks_kernel(
    mixed,
    betas,
    beta_stride,
    slots,
    starts,
    first_request,
    totals,
    queries,
    keys,
    corrections,
    changes,
    scores,
    scale,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVINGS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        head, row, at = tl.program_id(2), tl.arange(0, CHUNK), tl.arange(0, TILE)
        is_token, num_tokens = first + row < length, length - first
        of_head = (start + first + row) * NUM_HEADS + head
        inside = is_token[:, None] & (at < DIM)[None, :]
        given = mixed + of_head[:, None] * (3 * DIM) + at[None, :]
        query = (unit(silu(tl.load(given, mask=inside, other=0.0))) * scale).to(scores.dtype.element_ty)
        key = unit(silu(tl.load(given + DIM, mask=inside, other=0.0))).to(scores.dtype.element_ty)
        beta = tl.load(betas + (start + first + row) * beta_stride + head, mask=is_token, other=0.0).to(tl.float32)
        beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-beta)), 0.0)

        of_chunk = totals + ((start + first) * NUM_HEADS + head) * DIM + at[None, :]
        total = tl.load(of_chunk + row[:, None] * (NUM_HEADS * DIM), mask=inside, other=0.0)
        other = row[None, :]
        system = tl.zeros((CHUNK, CHUNK), tl.float32)
        meets = tl.where(
            row[:, None] == other, tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[:, None], system
        )
        for level in range(HALVINGS):
            half = 1 << level
            middle = row // (2 * half) * (2 * half) + half - 1  # the last token of a block's first half
            place = of_chunk + middle[:, None] * (NUM_HEADS * DIM)
            since = tl.load(place, mask=(middle < num_tokens)[:, None] & (at < DIM)[None, :], other=0.0)
            is_later = (row // half) % 2 == 1
            faded = tl.exp(tl.minimum(tl.where(is_later[:, None], total - since, since - total), 0.0))
            is_pair = (row[:, None] // (2 * half) == other // (2 * half)) & is_later[:, None]
            is_pair &= (other // half) % 2 == 0
            narrow = tl.trans((key * faded).to(scores.dtype.element_ty))
            found = tl.dot((query * faded).to(narrow.dtype), narrow, input_precision=PRECISION)
            meets = tl.where(is_pair, found, meets)
            found = tl.dot(tl.trans(narrow), narrow, input_precision=PRECISION)
            system = tl.where(is_pair, found, system)
        place = scores + of_head[:, None] * CHUNK + other
        tl.store(place, meets.to(scores.dtype.element_ty), mask=is_token[:, None])

        of_values = of_head[:, None] * DIM + at[None, :]
        last = tl.load(of_chunk + (tl.minimum(num_tokens, CHUNK) - 1) * (NUM_HEADS * DIM), mask=(at < DIM)[None, :])
        late = key * tl.exp(tl.where(inside, last - total, 0.0))
        tl.store(keys + of_values, late.to(keys.dtype.element_ty), mask=inside)
        tl.store(queries + of_values, (query * tl.exp(total)).to(queries.dtype.element_ty), mask=inside)
        solved = (inverse(system * beta[:, None], CHUNK, PRECISION) * beta[None, :]).to(changes.dtype.element_ty)
        lacks = tl.dot(solved, (key * tl.exp(total)).to(solved.dtype), input_precision=PRECISION)
        tl.store(corrections + of_values, lacks.to(solved.dtype), mask=inside)
        value = silu(tl.load(given + 2 * DIM, mask=inside, other=0.0)).to(solved.dtype)
        change = tl.dot(solved, value, input_precision=PRECISION)
        tl.store(changes + of_values, change.to(solved.dtype), mask=inside)


@triton.jit
def unit(x):
    """Return rows of length 1 in the directions of those of `x`."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
