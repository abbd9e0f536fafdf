"""The maximum of each block of a row of logits, and the sum of its weights: all that sampling needs of most blocks.

One read of the logits by as many programs as there are tiles; what follows looks again only at the few blocks that
matter. The weight of a token is exp((logit - largest logit of the row) / temperature). Statistics of a block are
relative to its own maximum, for the row's is not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv

BLOCK: Final = 128  # tokens; 256 bytes of bfloat16, read at once
FEW: Final = 2048  # candidates, or weights that a threshold is searched among, without reading the logits again
COLDEST: Final = tl.constexpr(2.0**-126)  # below, 1 / temperature would be infinite


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels of sampling are launched."""

    tile_blocks: int = 32  # that a program scans
    scan_warps: int = 4
    draw_warps: int = 16  # of the one program of a row


LAUNCH: Final = Launch()


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """What the programs of a row leave for those that come after. Used by one stream at a time."""

    maxima: Tensor  # float32 [max_rows, num_blocks]; NaN where a logit is
    sums: Tensor  # float32 [max_rows, num_blocks], of weights
    listed: Tensor  # int32 [max_rows, num_blocks]: blocks to look at again
    few: Tensor  # float32 [max_rows, FEW]: weights of candidates, or logits to look at again
    tokens: Tensor  # int32 [max_rows, FEW]: the candidates
    ones: Tensor  # float32 [max_rows]: the temperature of log-probabilities

    @property
    def max_rows(self) -> int:
        return len(self.maxima)


def sampling_workspace(max_rows: int, vocab_size: int, device: torch.device) -> SamplingWorkspace:
    """Allocate it for batches of up to `max_rows`."""
    num_blocks = cdiv(vocab_size, BLOCK)
    maxima, sums = (torch.empty(max_rows, num_blocks, device=device) for _ in range(2))
    listed, tokens = (torch.empty(max_rows, size, dtype=torch.int32, device=device) for size in (num_blocks, FEW))
    few, ones = torch.empty(max_rows, FEW, device=device), torch.ones(max_rows, device=device)
    return SamplingWorkspace(maxima, sums, listed, few, tokens, ones)


def scan_blocks(
    logits: Tensor, temperature: Tensor | None, workspace: SamplingWorkspace, launch: Launch = LAUNCH
) -> None:
    """Fill `maxima`, and `sums` where a temperature `[num_rows]` is given (any float dtype).

    `logits` `[num_rows, vocab_size]` are bfloat16, float16 or float32, dense within a row.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = workspace.maxima.shape[1]
    assert logits.stride(1) == 1, logits.stride()
    assert num_rows <= workspace.max_rows, (num_rows, workspace.max_rows)
    assert num_blocks == cdiv(vocab_size, BLOCK), (num_blocks, vocab_size)
    with torch.cuda.device_of(logits):
        scan_blocks_kernel[(num_rows, cdiv(num_blocks, launch.tile_blocks))](
            logits,
            logits.stride(0),
            workspace.maxima if temperature is None else temperature,
            workspace.maxima,
            workspace.sums,
            vocab_size,
            num_blocks,
            WEIGHTS=temperature is not None,
            BLOCK=BLOCK,
            BLOCKS=launch.tile_blocks,
            num_warps=launch.scan_warps,
        )


@triton.jit(do_not_specialize_on_alignment=["temperature"])  # a part of a tensor may begin anywhere
def scan_blocks_kernel(
    logits,
    row_stride,
    temperature,
    maxima,
    sums,
    vocab_size,
    num_blocks,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    x = tl.where(x == x, x, float("-inf"))
    largest = tl.max(x, axis=1)
    place = row * num_blocks + block
    tl.store(maxima + place, tl.where(has_nan, float("nan"), largest), mask=block < num_blocks)
    if WEIGHTS:
        base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        weights = weights_of(x, base[:, None], inverse_of(tl.load(temperature + row)))
        tl.store(sums + place, tl.sum(weights, axis=1), mask=block < num_blocks)


@triton.jit
def inverse_of(temperature):
    """0 is what rows that draw nothing have."""
    heat = temperature.to(tl.float32)
    return 1.0 / tl.maximum(tl.where(heat > 0, heat, 1.0), COLDEST)


@triton.jit
def weights_of(logits, largest, inverse_temperature):
    return tl.exp(tl.minimum((logits - largest) * inverse_temperature, 0.0))
