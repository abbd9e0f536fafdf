"""The kernel for Hopper, whose groups of warps are threads here: `TestOnGpus` of `test_latent_attention` has it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gluon_threads import Descriptor, kernels_of, launch
from torch import Tensor

from diptych.kernels.gpu.attention import hopper_latent
from diptych.kernels.gpu.attention.decode_attention import FP8, LOG2_E
from diptych.kernels.gpu.attention.latent_attention import reference_latent_attention

SCALE: Final = 0.05
FILE: Final = Path(hopper_latent.__file__).with_name("hopper_latent_kernel.py")
NUM_HEADS: Final = 6


@pytest.fixture(scope="module")
def kernel() -> Any:
    return kernels_of(FILE)["hopper_latent_kernel"]


class Step:
    """Requests whose pages lie anywhere in the middle layer of three; what nobody has is NaN."""

    def __init__(self, seq_lens: tuple[int, ...], page_size: int, kv_dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        counts = [-(-seq_len // page_size) for seq_len in seq_lens]
        pool = torch.randn(sum(counts) + 1, 3, 1, page_size, 1, 576)
        order = torch.randperm(len(pool))
        pool[order[sum(counts) :]] = torch.nan
        self.page_table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        first = 0
        for request, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
            self.page_table[request, :count] = order[first : first + count]
            if count:
                pool[order[first + count - 1], :, :, seq_len - (count - 1) * page_size :] = torch.nan
            first += count
        self.pool = pool.to(kv_dtype)
        self.kv_layer, self.page_size = self.pool[:, 1], page_size
        self.q = torch.randn(len(counts), NUM_HEADS, 576).to(torch.float16)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)


def attend(kernel: Any, step: Step, num_splits: int, head_tiles: int) -> Tensor:
    narrow = step.pool.dtype == FP8
    batch, page_rows = len(step.q), step.kv_layer.stride(0) // 576
    out = torch.full((batch, NUM_HEADS, 512), torch.nan, dtype=torch.float16)
    values = torch.full((2 * num_splits, NUM_HEADS, 512), torch.nan)
    maxima, sums = torch.full((2, 2 * num_splits, NUM_HEADS), torch.nan)
    rows = step.kv_layer.as_strided(((len(step.pool) - 1) * page_rows + step.page_size, 576), (576, 1))
    launch(
        kernel, num_splits * head_tiles, step.q, Descriptor(rows), step.page_table, step.seq_lens, out,
        values, maxima, sums, batch, step.q.stride(0), out.stride(0), step.page_table.stride(0), num_splits,
        SCALE * LOG2_E, 1.0,
        HEAD_TILES=head_tiles, GROUP=NUM_HEADS // head_tiles, BATCH=16, PAGE_SIZE=step.page_size, PAGE_ROWS=page_rows,
        BOX_TOKENS=min(step.page_size, 64), STAGES=1 if narrow else 2, NARROW=narrow, DTYPE=torch.float16,
        **hopper_latent.LAUNCH,
    )  # fmt: skip
    return merged(step.seq_lens, out, values, maxima, sums, num_splits)


def merged(seq_lens: Tensor, out: Tensor, values: Tensor, maxima: Tensor, sums: Tensor, num_splits: int) -> Tensor:
    """As `latent_merge_kernel` adds up parts."""
    tiles = (-(-seq_lens // 64)).clamp(min=1)
    ends = tiles.cumsum(0)
    share = -(-int(ends[-1]) // num_splits)
    for request, (end, count) in enumerate(zip(ends.tolist(), tiles.tolist(), strict=True)):
        first, last = (end - count) // share, (end - 1) // share
        if first == last:
            continue
        slots = torch.tensor([worker * 2 + (worker == first) for worker in range(first, last + 1)])
        grow = torch.exp2(maxima[slots] - maxima[slots].amax(0))
        total = (values[slots] * grow[..., None]).sum(0) / (sums[slots] * grow).sum(0)[:, None]
        out[request] = total.to(out.dtype)
    return out


@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=["16 bits", "FP8"])
@pytest.mark.parametrize(
    ("seq_lens", "page_size", "num_splits", "head_tiles"),
    [
        ((300, 64), 64, 3, 2),
        ((130, 0, 65, 1), 16, 2, 1),
        ((200, 70), 128, 5, 1),
        ((600, 500), 32, 1, 1),
    ],
    ids=["shares that cut requests", "small pages, and nobody", "large pages, and more shares than tiles", "one share of many tiles"],
)
def test_it_is_what_the_reference_computes_in_float64(
    kernel: Any, seq_lens: tuple[int, ...], page_size: int, num_splits: int, head_tiles: int, kv_dtype: torch.dtype
) -> None:
    step = Step(seq_lens, page_size, kv_dtype)
    out = attend(kernel, step, num_splits, head_tiles)
    own = torch.arange(len(seq_lens) + 1)
    seen = step.seq_lens > 0
    right = reference_latent_attention(
        step.q, step.kv_layer, step.page_table, step.seq_lens, own, rank=512, scale=SCALE
    ).nan_to_num()
    assert torch.allclose(out.double(), right, atol=2e-3, rtol=2e-3)
    assert not out[~seen].any()
