"""Causal attention of one request's new tokens to keys and values that were made of its latents, a piece at a time.

A prompt's query that is multiplied by its head's projection of keys meets latents of 512 numbers, and leaves 512; made
once for all queries of a step, keys have 128 and values have 128 (DeepSeek V2, arXiv 2405.04434, section 2.1.2). Made
keys take memory for each head, so a long context is walked in pieces: what one has found goes on to the next as running
maxima, sums and values. The part of keys that rotates is the same for all heads, and read from where latents are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.attention.extend_attention import LOG2_E, MASKED, load_rows
from diptych.kernels.gpu.grid import cdiv, power_of_two

MIN_DIMS: Final = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True)
class Made:
    """Keys and values of a piece of a request's context."""

    keys: Tensor  # [num_heads, num_keys, nope_dim]
    values: Tensor  # [num_heads, num_keys, value_dim]
    rotated: Tensor  # [num_keys, rope_dim], of any stride of rows
    begin: int  # position of the first

    @property
    def end(self) -> int:
        return self.begin + self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class Found:
    """What tokens have found so far: `values` are not divided by `sums` yet."""

    values: Tensor  # [num_tokens, num_heads, value_dim], float32
    maxima: Tensor  # [num_tokens, num_heads], float32, of scores as powers of two
    sums: Tensor  # like maxima

    @staticmethod
    def allocate(num_tokens: int, num_heads: int, value_dim: int, device: torch.device) -> Found:
        maxima, sums = torch.empty(2, num_tokens, num_heads, device=device)
        return Found(torch.empty(num_tokens, num_heads, value_dim, device=device), maxima, sums)


@dataclass(frozen=True, slots=True)
class Tile:
    """How much a program computes at once, and with what."""

    rows: int  # tokens
    keys: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, num_warps=4, num_stages=2)
    return Tile(rows=128, keys=64, num_warps=8, num_stages=3)


def decompressed_attention(
    nope: Tensor, rope: Tensor, made: Made, found: Found, out: Tensor, *, first_position: int, scale: float
) -> None:
    """Attend new tokens to a piece of their context; the last piece writes `out`, all others `found`.

    `nope` `[num_tokens, num_heads, nope_dim]`, `rope` `[num_tokens, num_heads, rope_dim]` and `out` `[num_tokens,
    num_heads, value_dim]` have any strides of tokens and heads. The tokens are at `first_position` and behind it, and
    each sees itself and all before it; the last piece is the one whose last key is the last token's. Pieces come in
    order, the first with `begin` 0; a `found` is that of one launch after the other. Runs on the current stream.
    """
    num_tokens, num_heads, nope_dim = nope.shape
    _check(nope, rope, made, found, out)
    tile = tile_for(nope.dtype)
    with torch.cuda.device_of(nope):
        decompressed_attention_kernel[(num_heads, cdiv(num_tokens, tile.rows))](
            out,
            nope,
            rope,
            made.keys,
            made.values,
            made.rotated,
            found.values,
            found.maxima,
            found.sums,
            num_tokens,
            made.keys.shape[1],
            first_position - made.begin,
            *nope.stride()[:2],
            *rope.stride()[:2],
            *out.stride()[:2],
            made.rotated.stride(0),
            num_heads,
            scale * LOG2_E,
            **constants_of(nope_dim, rope.shape[2], out.shape[2]),
            FIRST=made.begin == 0,
            LAST=made.end == first_position + num_tokens,
            ROWS=tile.rows,
            KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def constants_of(nope_dim: int, rope_dim: int, value_dim: int) -> dict[str, Any]:
    """Return what the kernel is compiled for, of widths."""
    return {
        "NOPE": nope_dim,
        "ROPE": rope_dim,
        "VALUE": value_dim,
        "NOPE_BLOCK": max(MIN_DIMS, power_of_two(nope_dim)),
        "ROPE_BLOCK": max(MIN_DIMS, power_of_two(rope_dim)),
        "VALUE_BLOCK": max(MIN_DIMS, power_of_two(value_dim)),
    }


def _check(nope: Tensor, rope: Tensor, made: Made, found: Found, out: Tensor) -> None:
    num_keys, (num_tokens, num_heads, value_dim) = made.keys.shape[1], out.shape
    assert nope.shape[:2] == rope.shape[:2] == (num_tokens, num_heads), (nope.shape, rope.shape, out.shape)
    assert made.keys.shape == (num_heads, num_keys, nope.shape[2]), (made.keys.shape, nope.shape)
    assert made.values.shape == (num_heads, num_keys, value_dim), (made.values.shape, out.shape)
    assert made.rotated.shape == (num_keys, rope.shape[2]), (made.rotated.shape, rope.shape)
    assert found.values.shape[1:] == out.shape[1:], (found.values.shape, out.shape)
    assert len(found.values) >= num_tokens, (found.values.shape, out.shape)
    assert made.keys.is_contiguous(), made.keys.stride()
    assert made.values.is_contiguous(), made.values.stride()
    assert nope.stride(2) == rope.stride(2) == out.stride(2) == 1, (nope.stride(), rope.stride(), out.stride())


@triton.jit(do_not_specialize=["num_tokens", "num_keys", "offset"])
def decompressed_attention_kernel(
    out,
    nope,
    rope,
    made_keys,
    made_values,
    rotated,
    found_values,
    found_maxima,
    found_sums,
    num_tokens,
    num_keys,
    offset,  # position of the first token, counted from the first key
    nope_stride,
    nope_head_stride,
    rope_stride,
    rope_head_stride,
    out_stride,
    out_head_stride,
    rotated_stride,
    num_heads,
    score_factor,  # makes powers of two of scores
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first: ends of prompts see the most keys
    tokens = tile * ROWS + tl.arange(0, ROWS)
    here = tokens < num_tokens
    rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    nopes, ropes, values = tl.arange(0, NOPE_BLOCK), tl.arange(0, ROPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_nope, in_rope, in_value = nopes < NOPE, ropes < ROPE, values < VALUE
    queries = load_rows(
        nope + rows * nope_stride + head * nope_head_stride, nopes, here, in_nope, False, NOPE_BLOCK != NOPE
    )
    if ROPE:
        ropes_of = rope + rows * rope_stride + head * rope_head_stride
        turned = load_rows(ropes_of, ropes, here, in_rope, False, ROPE_BLOCK != ROPE)
    PRECISION: tl.constexpr = "tf32x3" if queries.dtype == tl.float32 else "tf32"

    places = rows * num_heads + head  # in `found`
    if FIRST:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        attended = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
    else:
        largest = tl.load(found_maxima + places)
        total = tl.load(found_sums + places)
        attended = tl.load(found_values + (places * VALUE)[:, None] + values, mask=in_value, other=0.0)

    positions = offset + rows.to(tl.int32)
    first_end = tl.minimum(tl.maximum(offset + tile * ROWS + 1, 0), num_keys)  # of what the first row sees
    all_see = first_end // KEYS * KEYS
    end = tl.minimum(offset + tl.minimum((tile + 1) * ROWS, num_tokens), num_keys)
    first_row = head.to(tl.int64) * num_keys
    bounds = (0, all_see, end)
    for PHASE in tl.static_range(2):  # keys that all rows see, then the others
        for start in tl.range(bounds[PHASE], bounds[PHASE + 1], KEYS):
            keys = start + tl.arange(0, KEYS)
            exists = keys < num_keys
            k_rows = first_row + keys
            k = load_rows(made_keys + k_rows * NOPE, nopes, exists, in_nope, PHASE == 1, NOPE_BLOCK != NOPE)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
            if ROPE:
                r_rows = rotated + keys.to(tl.int64) * rotated_stride
                r = load_rows(r_rows, ropes, exists, in_rope, PHASE == 1, ROPE_BLOCK != ROPE)
                scores = tl.dot(turned, tl.trans(r), scores, input_precision=PRECISION)
            if PHASE == 1:
                seen = (keys[None, :] <= positions[:, None]) & exists[None, :]
                scores = tl.where(seen, scores, MASKED)
            new_largest = tl.maximum(largest, tl.max(scores, axis=1) * score_factor)
            weights = tl.exp2(scores * score_factor - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, axis=1)
            attended *= shrink[:, None]
            v = load_rows(made_values + k_rows * VALUE, values, exists, in_value, PHASE == 1, VALUE_BLOCK != VALUE)
            attended = tl.dot(weights.to(v.dtype), v, attended, input_precision=PRECISION)
            largest = new_largest

    inside = here[:, None] & in_value[None, :]
    if LAST:
        attended *= (1.0 / total)[:, None]
        out_rows = out + rows * out_stride + head * out_head_stride
        tl.store(out_rows[:, None] + values, attended.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(found_maxima + places, largest, mask=here)
        tl.store(found_sums + places, total, mask=here)
        tl.store(found_values + (places * VALUE)[:, None] + values, attended, mask=inside)


def reference_decompressed_attention(
    nope: Tensor, rope: Tensor, made: Made, *, first_position: int, scale: float
) -> Tensor:
    """Return the same as float64, for a context in one piece: `[num_tokens, num_heads, value_dim]`."""
    scores = torch.einsum("qhd,hkd->hqk", nope.double(), made.keys.double())
    scores = (scores + torch.einsum("qhd,kd->hqk", rope.double(), made.rotated.double())) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=nope.device).tril(first_position)
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), made.values.double())
