"""Changes float32 logits in place as requests ask: bias, penalties, and what a mask of tokens allows.

Bias and penalties touch the tokens listed and nothing else; a mask is written where it forbids, and no logit is read.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv

ENTRIES: Final = 256  # of a program
MASKED_TOKENS: Final = 2048  # of a program


def apply_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add `values[i]` (float32) to `logits[rows[i], token_ids[i]]`; a token may be listed twice. Indices are int64."""
    _check_entries(logits, rows, token_ids, values)
    with torch.cuda.device_of(logits):
        bias_kernel[(cdiv(len(rows), ENTRIES),)](
            logits, logits.stride(0), rows, token_ids, values, len(rows), ENTRIES=ENTRIES
        )


def apply_penalties(logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, subtract: Tensor) -> None:
    """Divide positive logits by `repetition[i]` (float32), multiply others with it, then subtract `subtract[i]`.

    Of `logits[rows[i], token_ids[i]]`; a row lists a token once.
    """
    _check_entries(logits, rows, token_ids, repetition, subtract)
    with torch.cuda.device_of(logits):
        penalties_kernel[(cdiv(len(rows), ENTRIES),)](
            logits, logits.stride(0), rows, token_ids, repetition, subtract, len(rows), ENTRIES=ENTRIES
        )


def apply_token_mask(logits: Tensor, token_mask: Tensor) -> None:
    """Set to minus infinity what is not allowed: bit i % 32 of word i // 32 of a row allows token i.

    `token_mask` is int32 `[num_rows, ceil(vocab_size / 32)]`, dense.
    """
    num_rows, vocab_size = logits.shape
    assert token_mask.shape == (num_rows, cdiv(vocab_size, 32)), (token_mask.shape, logits.shape)
    assert token_mask.is_contiguous(), token_mask.stride()
    _check_logits(logits)
    with torch.cuda.device_of(logits):
        token_mask_kernel[(num_rows, cdiv(vocab_size, MASKED_TOKENS))](
            logits, logits.stride(0), token_mask, token_mask.shape[1], vocab_size, TOKENS=MASKED_TOKENS
        )


def _check_logits(logits: Tensor) -> None:
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()


def _check_entries(logits: Tensor, rows: Tensor, token_ids: Tensor, *values: Tensor) -> None:
    _check_logits(logits)
    assert rows.dtype == token_ids.dtype == torch.int64, (rows.dtype, token_ids.dtype)
    for array in (rows, token_ids, *values):
        assert array.shape == rows.shape, (array.shape, rows.shape)
        assert array.is_contiguous(), array.stride()


@triton.jit(do_not_specialize=["num_entries"])  # else Triton compiles once more for multiples of 16, while serving
def bias_kernel(logits, row_stride, rows, token_ids, values, num_entries, ENTRIES: tl.constexpr):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < num_entries
    place = tl.load(rows + entry, mask=inside, other=0) * row_stride + tl.load(token_ids + entry, mask=inside, other=0)
    tl.atomic_add(logits + place, tl.load(values + entry, mask=inside, other=0.0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_entries"])
def penalties_kernel(logits, row_stride, rows, token_ids, repetition, subtract, num_entries, ENTRIES: tl.constexpr):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < num_entries
    place = tl.load(rows + entry, mask=inside, other=0) * row_stride + tl.load(token_ids + entry, mask=inside, other=0)
    x = tl.load(logits + place, mask=inside, other=0.0)
    factor = tl.load(repetition + entry, mask=inside, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    tl.store(logits + place, x - tl.load(subtract + entry, mask=inside, other=0.0), mask=inside)


@triton.jit
def token_mask_kernel(logits, row_stride, token_mask, num_words, vocab_size, TOKENS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = token < vocab_size
    words = tl.load(token_mask + row * num_words + token // 32, mask=inside, other=0)
    forbidden = inside & ((words >> (token % 32)) & 1 == 0)
    tl.store(logits + row * row_stride + token, tl.full((TOKENS,), float("-inf"), tl.float32), mask=forbidden)


def reference_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Do as `apply_bias`."""
    logits.index_put_((rows, token_ids), values, accumulate=True)


def reference_penalties(logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, subtract: Tensor) -> None:
    """Do as `apply_penalties`."""
    seen = logits[rows, token_ids]
    logits[rows, token_ids] = torch.where(seen > 0, seen / repetition, seen * repetition) - subtract


def reference_token_mask(logits: Tensor, token_mask: Tensor) -> None:
    """Do as `apply_token_mask`."""
    bits = token_mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=token_mask.device) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
