"""State spaces with one decay a head and token (Mamba 2, arXiv 2405.21060, section 6), for prompts.

Two kernels: each chunk of a group finds what its tokens read of each other; `scan_chunks` goes through the chunks of a
head one after the other. The torch reference is `diptych.engine.models.layers.recurrent.mamba2_scan`. Requests of one
token are left alone.
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
    precision,
    prompt_of,
    scan_chunks,
)
from diptych.kernels.gpu.recurrent.short_conv_step import silu, softplus


class MambaLaunch(NamedTuple):
    """How the kernels are launched."""

    chunk_warps: int = 8
    scan: ScanLaunch | None = None  # None: as many requests need it


LAUNCH: Final = MambaLaunch()


class MambaHeads(NamedTuple):
    """A layer's constants of each head, float32 `[num_groups, heads of a group]`."""

    rate: Tensor  # of decays, below 0
    bias: Tensor  # of steps
    skip: Tensor  # so much of what a head has of a token is added to what it reads
    min_step: float


def mamba2_prompts(
    mixed: Tensor,
    steps: Tensor,
    heads: MambaHeads,
    state: Tensor,
    prompts: Prompts,
    out: Tensor,
    launch: MambaLaunch = LAUNCH,
) -> None:
    """Compute several tokens of each of some requests: `out`, float32 `[num_tokens, num_heads, head_dim]`.

    `mixed` is float32 `[num_tokens, num_groups, group_channels]`, before SiLU; `steps` `[num_tokens, num_heads]` may
    have gaps between its rows. `state`, float32 `[num_slots, num_heads, head_dim, state_size]`, with any gaps between
    slots, is brought up to date.
    """
    num_tokens, num_heads, head_dim = out.shape
    num_groups, state_size = len(heads.rate), state.shape[3]
    prompts.check()
    assert mixed.shape == (num_tokens, num_groups, num_heads // num_groups * head_dim + 2 * state_size), mixed.shape
    assert mixed.dtype == out.dtype == state.dtype == torch.float32, (mixed.dtype, out.dtype, state.dtype)
    assert steps.stride(1) == 1, steps.stride()
    assert all(each.is_contiguous() for each in (mixed, state[0], *heads[:3], out))
    chunks = _allocate(out, (num_groups, state_size), operands(steps.dtype), heads.skip)
    with torch.cuda.device_of(out):
        prepare_mamba_chunks_kernel[(cdiv(prompts.max_len, CHUNK), prompts.num_requests, num_groups)](
            *(mixed, steps, steps.stride(0), heads.rate, heads.bias, heads.min_step, *prompts.on_device),
            *(chunks.queries, chunks.keys, chunks.changes, chunks.scores, chunks.totals, chunks.sizes),
            **chunk_constants(num_heads, num_groups, head_dim, state_size, chunks.changes.dtype),
            num_warps=launch.chunk_warps,
        )
        scan_chunks(chunks, state, (1, state_size), prompts, out, launch.scan)


def operands(dtype: torch.dtype) -> torch.dtype:
    """The type of products: float16 can't hold what two vectors, which nothing norms, are together."""
    return torch.float32 if dtype == torch.float16 else dtype


def _allocate(out: Tensor, vectors: tuple[int, int], dtype: torch.dtype, skip: Tensor) -> Chunks:
    num_tokens, num_heads, _ = out.shape
    return Chunks(
        queries=out.new_empty(num_tokens, *vectors, dtype=dtype),
        keys=out.new_empty(num_tokens, *vectors, dtype=dtype),
        corrections=None,
        changes=torch.empty_like(out, dtype=dtype),
        scores=out.new_empty(num_tokens, num_heads, CHUNK, dtype=dtype),
        totals=out.new_empty(num_tokens, num_heads),
        sizes=out.new_empty(num_tokens, num_heads),
        skip=skip,
    )


def chunk_constants(
    num_heads: int, num_groups: int, head_dim: int, state_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_groups,
        "DIM": head_dim,
        "SIZE": state_size,
        "DIMS": power_of_two(head_dim),
        "SIZES": max(16, power_of_two(state_size)),
        "CHUNK": CHUNK,
        "PRECISION": precision(dtype),
    }


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def prepare_mamba_chunks_kernel(
    mixed,
    steps,
    step_stride,
    rate,
    bias,
    min_step,
    slots,
    starts,
    first_request,
    queries,
    keys,
    changes,
    scores,
    totals,
    sizes,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    SIZES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        group, row = tl.program_id(2), tl.arange(0, CHUNK)
        is_token = first + row < length
        token = start + first + row
        of_group = token * (NUM_HEADS // GROUP) + group
        given = mixed + of_group[:, None] * (GROUP * DIM + 2 * SIZE)
        at = tl.arange(0, SIZES)[None, :]
        inside, place = is_token[:, None] & (at < SIZE), given + GROUP * DIM + at
        writing = silu(tl.load(place, mask=inside, other=0.0)).to(scores.dtype.element_ty)
        tl.store(keys + of_group[:, None] * SIZE + at, writing, mask=inside)
        reading = silu(tl.load(place + SIZE, mask=inside, other=0.0)).to(scores.dtype.element_ty)
        tl.store(queries + of_group[:, None] * SIZE + at, reading, mask=inside)
        products = tl.dot(reading, tl.trans(writing), input_precision=PRECISION)

        at = tl.arange(0, DIMS)[None, :]
        inside = is_token[:, None] & (at < DIM)
        for number in range(GROUP):
            head = group * GROUP + number
            of_head = token * NUM_HEADS + head
            raw = tl.load(steps + token * step_stride + head, mask=is_token, other=0.0).to(tl.float32)
            size = tl.where(is_token, tl.maximum(softplus(raw + tl.load(bias + head)), min_step), 0.0)
            tl.store(sizes + of_head, size, mask=is_token)
            total = tl.cumsum(size * tl.load(rate + head), axis=0)
            tl.store(totals + of_head, total, mask=is_token)
            meets = (products * fading(total, CHUNK)).to(scores.dtype.element_ty)
            of_scores = of_head[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            tl.store(scores + of_scores, meets, mask=is_token[:, None])
            value = silu(tl.load(given + number * DIM + at, mask=inside, other=0.0))
            tl.store(changes + of_head[:, None] * DIM + at, value.to(changes.dtype.element_ty), mask=inside)
