"""The log-probabilities of a token of each row of logits, and of the likeliest tokens there.

The logits are read once, for the maximum and the sum of each block of tokens. The likeliest tokens are then found one
after another, each in the first block that has the largest of what remains: for the few that anybody asks for, less
work than any selection from the whole row. Equal logits come in the order of their tokens.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import power_of_two
from diptych.kernels.gpu.sampling.sampling_blocks import BLOCK, SamplingWorkspace, scan_blocks, weights_of

LOWEST: Final = tl.constexpr(-(2**31))
PER_ROW: Final = ("token_ids", "out", "top_ids", "top_logprobs")
MAGNITUDE: Final = tl.constexpr(0x7FFFFFFF)


def logprobs(
    logits: Tensor,
    token_ids: Tensor,
    out: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Write the log-probabilities of `token_ids` `[num_rows]` (int64) to `out` `[num_rows]`, float32.

    And the likeliest tokens and theirs, best first, to `top_ids` (int64) and `top_logprobs` (float32), both
    `[num_rows, num_top]`. A row whose token is negative gets zeros; one with a NaN among its logits
    gets NaN. `logits` as in `sampling.greedy`.
    """
    num_rows, vocab_size = logits.shape
    num_top = top_ids.shape[1]
    assert token_ids.shape == out.shape == (num_rows,), (token_ids.shape, out.shape, num_rows)
    assert top_ids.shape == top_logprobs.shape == (num_rows, num_top), (top_ids.shape, top_logprobs.shape)
    assert num_top <= vocab_size, (num_top, vocab_size)
    assert (token_ids.dtype, top_ids.dtype) == (torch.int64, torch.int64), (token_ids.dtype, top_ids.dtype)
    num_blocks = workspace.maxima.shape[1]
    scan_blocks(logits, workspace.ones[:num_rows], workspace)
    with torch.cuda.device_of(logits):
        logprobs_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            token_ids,
            workspace.maxima,
            workspace.sums,
            out,
            top_ids,
            top_logprobs,
            vocab_size,
            num_blocks,
            num_top,
            BLOCK=BLOCK,
            BLOCKS=power_of_two(num_blocks),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=PER_ROW)  # nothing compiles while serving
def logprobs_kernel(
    logits,
    row_stride,
    token_ids,
    maxima,
    sums,
    out,
    top_ids,
    top_logprobs,
    vocab_size,
    num_blocks,
    num_top,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two that is at least num_blocks
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    tops = tl.load(maxima + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    own_sums = tl.load(sums + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    largest = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
    scale = tl.where(tops > float("-inf"), weights_of(tops, largest, 1.0), 0.0)
    log_total = tl.log(tl.sum((own_sums * scale).to(tl.float64), axis=0).to(tl.float32))
    if tl.max((tops != tops).to(tl.int32), axis=0) > 0:
        log_total = float("nan")
    token_id = tl.load(token_ids + row)
    wanted = token_id >= 0
    x = tl.load(logits + row * row_stride + token_id, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + row, tl.where(wanted, x - largest - log_total, 0.0))
    keys = tl.where(block < num_blocks, key_of(tops), LOWEST)
    last_key, last_token = tl.full((), MAGNITUDE, tl.int32), tl.full((), -1, tl.int32)
    rank = tl.zeros((), tl.int32)
    while rank < num_top:
        best = tl.max(keys, axis=0)
        at = tl.min(tl.where(keys == best, block, BLOCKS - 1), axis=0)
        token = at * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        own = key_of(tl.load(logits + row * row_stride + token, mask=inside, other=0.0).to(tl.float32))
        remains = inside & ((own < last_key) | (own == last_key) & (token > last_token))
        found = tl.min(tl.where(remains & (own == best), token, vocab_size - 1), axis=0)
        place = row * num_top + rank
        tl.store(top_ids + place, tl.where(wanted, found, 0).to(tl.int64))
        tl.store(top_logprobs + place, tl.where(wanted, value_of(best) - largest - log_total, 0.0))
        rest = inside & ((own < best) | (own == best) & (token > found))
        keys = tl.where(block == at, tl.max(tl.where(rest, own, LOWEST), axis=0), keys)
        last_key, last_token = best, found
        rank += 1


@triton.jit
def key_of(x):
    """Return integers in the order of floats; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ MAGNITUDE)


@triton.jit
def value_of(key):
    return tl.where(key >= 0, key, key ^ MAGNITUDE).to(tl.float32, bitcast=True)


def reference_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same in float64."""
    all_logprobs = logits.double().log_softmax(dim=-1)
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return all_logprobs.gather(1, token_ids[:, None])[:, 0], order, all_logprobs.gather(1, order)
