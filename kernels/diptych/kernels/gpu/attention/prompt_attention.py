"""Attention of prompts on Hopper, over pages: what `extend_attention` computes, at the speed of FlashAttention-3.

Serves heads of 64 or 128 dimensions in 16 bits that see all before them, over pages of 8 to 128 tokens of the same type
(`serves`); the rest, and steps that do not fill the GPU, are `extend_attention`'s. FP8 pages are expanded first, into a
pool of the states' type with pages of a whole tile (`expand_pages`). The work is shared out on the host, once a step
for all layers (`PromptWork`). The kernel is imported once it is launched: see `hopper`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.kernels.gpu.attention.extend_attention import LOG2_E
from diptych.kernels.gpu.attention.prompt_work import I64, share_work
from diptych.kernels.gpu.hopper import why_not

HEAD_DIMS: Final = (64, 128)
FP8: Final = torch.float8_e4m3fn
DTYPES: Final = (torch.bfloat16, torch.float16)
PAGE_SIZES: Final = (8, 16, 32, 64, 128)
NUM_ROWS: Final = 128  # of a tile: pairs of a token and a query head
BOX: Final = 64  # dimensions that the copy engine brings at once


@dataclass(frozen=True, slots=True)
class PromptTile:
    """How much a program computes at once, and with what."""

    keys: int = 128
    stages: int = 2  # tiles of keys, and of values, that are there or come
    registers: int = 240  # of a thread that multiplies
    copy_registers: int = 24  # with those of two groups that multiply: what a multiprocessor has


TILE: Final = PromptTile()


def serves(kv: Tensor) -> bool:
    """Whether `prompt_attention` reads pages like these, of one layer or of all; FP8 once they are expanded."""
    page_size, _, head_dim = kv.shape[-3:]
    plane_stride, slot_stride, head_stride, _ = kv.stride()[-4:]
    return (
        kv.dtype in (*DTYPES, FP8)
        and head_dim in HEAD_DIMS
        and (page_size in PAGE_SIZES or kv.dtype == FP8)
        and head_stride == head_dim
        and kv.stride(0) % slot_stride == plane_stride % slot_stride == 0
        and why_not(kv.device) is None
    )


@dataclass(frozen=True, slots=True, eq=False)
class PromptWork:
    """A step's tiles, shared out. `items` int32 `[rounds * programs, 4]` on the GPU."""

    items: Tensor
    programs: int

    @staticmethod
    def of(extend_lens: I64, seq_lens: I64, kv_layer: Tensor, num_heads: int, tile: PromptTile = TILE) -> PromptWork:
        """Share out on the host; nothing waits for the device."""
        num_kv_heads, head_dim = kv_layer.shape[-2:]
        programs = torch.cuda.get_device_properties(kv_layer.device).multi_processor_count
        items = share_work(
            extend_lens,
            seq_lens,
            num_heads // num_kv_heads,
            num_kv_heads,
            NUM_ROWS,
            tile.keys,
            4 * head_dim,
            programs,
        )
        return PromptWork(to_device(items, kv_layer.device), programs)


def to_device(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy without waiting: torch keeps the pinned memory until the copy is over."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def prompt_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    out: Tensor,
    work: PromptWork,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile: PromptTile = TILE,
) -> None:
    """See `extend_attention`; `work` is that of these lengths."""
    from diptych.kernels.gpu.attention.prompt_attention_kernel import prompt_attention_kernel, rows_by_boxes

    num_heads, head_dim = q.shape[1:]
    num_pages, _, page_size, num_kv_heads, _ = kv_layer.shape
    page_stride, value_stride, slot_stride, head_stride, _ = kv_layer.stride()
    assert head_stride == head_dim, kv_layer.stride()
    page_rows, value_rows = page_stride // slot_stride, value_stride // slot_stride
    rows = (num_pages - 1) * page_rows + value_rows + page_size
    columns = num_kv_heads * head_dim
    pool = rows_by_boxes(kv_layer, [rows, columns], slot_stride, [page_size, BOX])
    with torch.cuda.device_of(q):
        prompt_attention_kernel[(work.programs,)](
            out,
            q,
            pool,
            page_table,
            seq_lens,
            extend_starts,
            work.items,
            len(work.items),
            *out.stride()[:2],
            *q.stride()[:2],
            page_table.stride(0),
            scale * k_scale * LOG2_E,
            v_scale,
            GROUP=num_heads // num_kv_heads,
            KEYS=tile.keys,
            DIM=head_dim,
            STAGES=tile.stages,
            PAGE_SIZE=page_size,
            PAGE_ROWS=page_rows,
            VALUE_ROWS=value_rows,
            REGISTERS=tile.registers,
            COPY_REGISTERS=tile.copy_registers,
            num_warps=4,
        )
