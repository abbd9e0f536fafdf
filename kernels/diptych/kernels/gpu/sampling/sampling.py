"""Chooses a token of each row of logits on the GPU: the largest, or one drawn after temperature, top-k, top-p, min-p.

Two launches, whatever the rows ask for: one reads the logits and leaves the maximum and the sum of weights of each
block; the other, a program a row, looks again only at the blocks that matter. No row is sorted, nothing waits for the
host, and a row's token does not depend on the other rows: one uniform number is looked up in the cumulative
distribution over token ids, first among blocks, then within one. The same number gives the same token as on the CPU,
but for rounding where it falls between two tokens.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import power_of_two
from diptych.kernels.gpu.sampling.sampling_blocks import (
    BLOCK,
    FEW,
    LAUNCH,
    Launch,
    SamplingWorkspace,
    inverse_of,
    sampling_workspace,
    scan_blocks,
    weights_of,
)
from diptych.kernels.gpu.sampling.sampling_candidates import candidates, left_of
from diptych.kernels.gpu.sampling.sampling_threshold import cut, keep

__all__ = ["Launch", "SamplingWorkspace", "greedy", "reference_sample", "sample", "sampling_workspace"]

NO_TOKEN: Final = tl.constexpr(-1)
GREEDY_WARPS: Final = 4
PER_ROW: Final = ("temperature", "top_k", "top_p", "min_p", "uniforms", "out")


def greedy(logits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> None:
    """Write the first largest token of each row to `out` `[num_rows]`, int64; -1 where that is NaN or infinite.

    `logits` `[num_rows, vocab_size]` are bfloat16, float16 or float32, dense within a row, and are read once. Runs on
    the current stream.
    """
    scan_blocks(logits, None, workspace)
    _choose(logits, (), out, workspace, GREEDY_WARPS)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    out: Tensor,
    workspace: SamplingWorkspace,
    launch: Launch = LAUNCH,
) -> None:
    """Write a token of each row to `out` `[num_rows]`, int64; -1 where the largest logit is NaN or infinite.

    `logits` as in `greedy`. Parameters are `[num_rows]` on the same GPU, of any type that holds them, and are read
    there, so a captured graph may be replayed with others: `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 and
    `min_p` 0 keep all, `uniforms` (float64) are in [0, 1). Order: temperature, top-k, top-p of what is left, min-p.
    What is as likely as the least likely token kept is kept, too; a token of weight 0 is never drawn.
    """
    scan_blocks(logits, temperature, workspace, launch)
    _choose(logits, (temperature, top_k, top_p, min_p, uniforms), out, workspace, launch.draw_warps)


def _choose(
    logits: Tensor, params: tuple[Tensor, ...], out: Tensor, workspace: SamplingWorkspace, num_warps: int
) -> None:
    num_rows, vocab_size = logits.shape
    num_blocks = workspace.maxima.shape[1]
    assert out.shape == (num_rows,), (out.shape, num_rows)
    assert out.dtype == torch.int64, out.dtype
    for param in params:
        assert param.shape == (num_rows,), (param.shape, num_rows)
        assert param.is_contiguous(), param.stride()
    with torch.cuda.device_of(logits):
        choose_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            *(params or (out,) * 5),
            workspace.maxima,
            workspace.sums,
            workspace.listed,
            workspace.few,
            workspace.tokens,
            out,
            vocab_size,
            num_blocks,
            DRAWS=bool(params),
            BLOCK=BLOCK,
            BLOCKS=power_of_two(num_blocks),
            FEW=FEW,
            num_warps=num_warps,
        )


@triton.jit(do_not_specialize_on_alignment=PER_ROW)  # a part of a tensor may begin anywhere
def choose_kernel(
    logits,
    row_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    maxima,
    sums,
    listed,
    few,
    tokens,
    out,
    vocab_size,
    num_blocks,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two that is at least num_blocks
    FEW: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    logits += number * row_stride
    maxima += number * num_blocks
    block = tl.arange(0, BLOCKS)
    tops = tl.load(maxima + block, mask=block < num_blocks, other=float("-inf"))
    has_nan = tl.max((tops != tops).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
    token = tl.full((), NO_TOKEN, tl.int32)
    if (tl.abs(largest) < float("inf")) & (has_nan == 0):
        draws = tl.full((), 0, tl.int1)
        if DRAWS:
            heat = tl.load(temperature + number)
            draws = heat > 0
        if draws:
            if DRAWS:
                sums += number * num_blocks
                row = (
                    logits,
                    maxima,
                    sums,
                    listed + number * num_blocks,
                    few + number * FEW,
                    largest,
                    inverse_of(heat),
                )
                k, p = tl.load(top_k + number).to(tl.int64), tl.load(top_p + number).to(tl.float32)
                least, uniform = tl.load(min_p + number).to(tl.float32), tl.load(uniforms + number).to(tl.float64)
                tokens += number * FEW
                token = drawn(
                    row, tokens, k, p, least, uniform, vocab_size, num_blocks, BLOCK, BLOCKS, FEW
                )  # fmt: skip
        else:
            token = first_largest(logits, tops, largest, vocab_size, BLOCK, BLOCKS)
    tl.store(out + number, token.to(tl.int64))


@triton.jit
def drawn(
    row,
    tokens,
    k,
    p,
    least,
    uniform,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return the token of a row that draws: among few candidates if it is cut to those, else among all."""
    _, _, _, _, few, _, _ = row
    total = weigh_blocks(row, num_blocks, BLOCKS)
    num_few, low = tl.full((), FEW + 1, tl.int32), tl.zeros((), tl.int32)
    if (k > 0) & (k < vocab_size) | (p < 1) | (least > 0):
        num_few, low = candidates(row, tokens, k, p, least, total, vocab_size, num_blocks, BLOCK, BLOCKS, FEW)
    if num_few <= FEW:
        left = left_of(few, num_few, low, k, p, least, vocab_size, total, FEW)
        token = draw_of(left, tokens, uniform, FEW)
    else:
        threshold = kept_weight(row, k, p, total, vocab_size, num_blocks, BLOCK, BLOCKS, FEW)
        if least > threshold:
            threshold = least
            keep(row, threshold, vocab_size, num_blocks, BLOCK, BLOCKS)
        token = draw(row, threshold, uniform, vocab_size, num_blocks, BLOCK, BLOCKS)
    return token


@triton.jit
def first_largest(logits, tops, largest, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.min(tl.where(tops == largest, tl.arange(0, BLOCKS), BLOCKS), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == largest, token, vocab_size), axis=0)


@triton.jit
def weigh_blocks(row, num_blocks, BLOCKS: tl.constexpr):
    """Make the sums of blocks relative to the row's largest logit; return their sum."""
    _, maxima, sums, _, _, largest, inverse = row
    block = tl.arange(0, BLOCKS)
    tops = tl.load(maxima + block, mask=block < num_blocks, other=float("-inf"))
    own = tl.load(sums + block, mask=block < num_blocks, other=0.0)
    weighed = tl.where(tops > float("-inf"), own * weights_of(tops, largest, inverse), 0.0)
    tl.store(sums + block, weighed, mask=block < num_blocks)
    tl.debug_barrier()
    return tl.sum(weighed.to(tl.float64), axis=0)


@triton.jit
def kept_weight(row, k, p, total, vocab_size, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FEW: tl.constexpr):
    """Apply top-k, then top-p to what is left; return the weight that a token must reach. `sums` are of those."""
    _, _, sums, _, _, _, _ = row
    block = tl.arange(0, BLOCKS)
    threshold = tl.zeros((), tl.float32)
    turn = tl.zeros((), tl.int32)
    while turn < 2:
        counts = turn == 0
        cuts = tl.where(counts, (k > 0) & (k < vocab_size), p < 1)
        if cuts:
            target = tl.where(counts, k.to(tl.float32), (p.to(tl.float64) * total).to(tl.float32))
            threshold = cut(row, threshold, target, counts, vocab_size, num_blocks, BLOCK, BLOCKS, FEW)
            keep(row, threshold, vocab_size, num_blocks, BLOCK, BLOCKS)
            left = tl.load(sums + block, mask=block < num_blocks, other=0.0)
            total = tl.sum(left.to(tl.float64), axis=0)
        turn += 1
    return threshold


@triton.jit
def draw_of(left, tokens, uniform, FEW: tl.constexpr):
    """Return which of the tokens `draw` would: `left` are their weights."""
    amounts = left.to(tl.float64)
    place, _ = first_above(amounts, uniform * tl.sum(amounts, axis=0), FEW)
    return tl.load(tokens + place)


@triton.jit
def draw(row, threshold, uniform, vocab_size, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the token where the cumulative weight passes `uniform` of the total."""
    logits, _, sums, _, _, largest, inverse = row
    block = tl.arange(0, BLOCKS)
    amounts = tl.load(sums + block, mask=block < num_blocks, other=0.0).to(tl.float64)
    target = uniform * tl.sum(amounts, axis=0)
    chosen, before = first_above(amounts, target, BLOCKS)
    token = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    weights = weights_of(x, largest, inverse)
    place, _ = first_above(tl.where(weights >= threshold, weights, 0.0).to(tl.float64), target - before, BLOCK)
    return chosen * BLOCK + place


@triton.jit
def first_above(amounts, target, SIZE: tl.constexpr):
    """Return where the running sum first exceeds `target`, and the sum before; never an entry that adds nothing.

    Rounding may put the target at the very end; the last entry that adds something is meant then.
    """
    place = tl.arange(0, SIZE)
    running = tl.cumsum(amounts, axis=0)
    first = tl.min(tl.where((amounts > 0) & (running > target), place, SIZE), axis=0)
    last = tl.max(tl.where(amounts > 0, place, 0), axis=0)
    found = tl.where(first < SIZE, first, last)
    return found, tl.sum(tl.where(place == found, running - amounts, 0.0), axis=0)


def reference_sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """Return the same tokens by sorting float64 weights."""
    values, tokens = logits.double().max(dim=-1)
    heat = torch.where(temperature > 0, temperature, 1.0).double()
    weights = ((logits.double() - values[:, None]) / heat[:, None]).exp()
    size = torch.where(top_k > 0, top_k, weights.shape[1]).clamp(max=weights.shape[1]).long()
    largest = weights.sort(dim=-1, descending=True).values
    weights = weights.masked_fill(weights < largest.gather(1, size[:, None] - 1), 0.0)
    running = weights.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    size = (running < top_p[:, None] * running[:, -1:]).sum(dim=-1, keepdim=True)
    nucleus = largest.gather(1, size.clamp(max=weights.shape[1] - 1))
    weights = weights.masked_fill((weights < nucleus) & (top_p < 1)[:, None] | (weights < min_p[:, None]), 0.0)
    running = weights.cumsum(dim=-1)
    drawn = torch.searchsorted(running, uniforms.double()[:, None] * running[:, -1:], right=True)[:, 0]
    return torch.where(temperature > 0, drawn, tokens).masked_fill(~values.isfinite(), -1)
