"""Decode steps' attention to latents on Hopper: what `latent_decode` does, by a kernel that tells warps apart.

Serves latents of 512 dimensions with 64 that rotate, in 16 bits, over pages that tiles of 64 tokens are made of, or
that are made of tiles (`serves`); the rest is the portable kernel's. Shares and what they leave are the same.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diptych.kernels.gpu.attention.decode_attention import FP8, product_dtype
from tmp_two_kernel import BOX_DIMS, KEY_DIM, KEYS, hopper_latent_kernel

HOPPER: Final = (9, 0)
DIMS: Final = (512, 64)
DTYPES: Final = (torch.bfloat16, torch.float16)
BOX: Final = int(BOX_DIMS.value)
TILE_TOKENS: Final = int(KEYS.value)
WIDTH: Final = int(KEY_DIM.value)
LEAST_PAGE: Final = 8  # tokens, of which the copy engine's pattern has eight rows
LAYOUT: Final = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
NARROW_LAYOUT: Final = NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
LAUNCH: Final[dict[str, Any]] = {"REGISTERS": 232, "COPY_REGISTERS": 40}


def serves(dims: tuple[int, int], dtype: torch.dtype, kv: Tensor) -> bool:
    """Whether the kernel reads pages like these, of one layer or of all; `dims`: of a latent, and what rotates."""
    return (
        kv.is_cuda
        and torch.cuda.get_device_capability(kv.device) == HOPPER
        and dims == DIMS
        and dtype in DTYPES
        and kv.dtype in (dtype, FP8)
        and fits(kv.shape[-3])
        and kv.stride(-3) == WIDTH
        and kv.stride(0) % WIDTH == 0
    )


def fits(page_size: int) -> bool:
    """Whether pages are of a size that tiles are made of, or that is made of them."""
    return page_size % TILE_TOKENS == 0 or (page_size >= LEAST_PAGE and TILE_TOKENS % page_size == 0)


def attend(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    *,
    head_tiles: int,
    score_scale: float,
    value_scale: float,
    num_splits: int,
    batch_block: int,
) -> None:
    """Leave what shares have of requests in `parts`, or in `out` where a share has all of one."""
    num_pages, _, page_size, _, _ = kv_layer.shape
    page_rows, box_tokens = kv_layer.stride(0) // WIDTH, min(page_size, TILE_TOKENS)
    rows = (num_pages - 1) * page_rows + page_size
    narrow = kv_layer.dtype == FP8
    layout = NARROW_LAYOUT if narrow else LAYOUT
    pool = TensorDescriptor(kv_layer, [rows, WIDTH], [WIDTH, 1], [box_tokens, BOX], layout)
    hopper_latent_kernel[(num_splits * head_tiles,)](
        q,
        pool,
        page_table,
        seq_lens,
        out,
        *parts,
        len(q),
        q.stride(0),
        out.stride(0),
        page_table.stride(0),
        num_splits,
        score_scale,
        value_scale,
        HEAD_TILES=head_tiles,
        GROUP=q.shape[1] // head_tiles,
        BATCH=batch_block,
        PAGE_SIZE=page_size,
        PAGE_ROWS=page_rows,
        BOX_TOKENS=box_tokens,
        STAGES=1 if narrow else 2,  # shared memory has room for two tiles of products' operands
        NARROW=narrow,
        DTYPE=product_dtype(q.dtype, kv_layer.dtype),
        **LAUNCH,
        num_warps=4,
    )
