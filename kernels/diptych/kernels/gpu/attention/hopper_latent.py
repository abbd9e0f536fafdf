"""Decode steps' attention to latents on Hopper: what `latent_decode` does, by a kernel that tells warps apart.

Serves latents of 512 dimensions with 64 that rotate, in 16 bits, over pages that tiles of 64 tokens are made of, or
that are made of tiles (`serves`); the rest is the portable kernel's. Shares and what they leave are the same. Of rows
that chose their tokens, the same over pages of any size. Kernels are imported once they are launched: see `hopper`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor

from diptych.kernels.gpu.attention.decode_attention import FP8, batch_block, product_dtype
from diptych.kernels.gpu.hopper import why_not

DIMS: Final = (512, 64)
DTYPES: Final = (torch.bfloat16, torch.float16)
WIDTH: Final = sum(DIMS)
TILE_TOKENS: Final = 64
NUM_ROWS: Final = 64  # of a tile: heads of one token, or of several
BOX: Final = 64  # dimensions that the copy engine brings at once
LEAST_PAGE: Final = 8  # tokens, of which the copy engine's pattern has eight rows
LAUNCH: Final[dict[str, Any]] = {"REGISTERS": 184, "COPY_REGISTERS": 40}


class Heads(Protocol):
    """What is asked of a `LatentShape`."""

    @property
    def num_heads(self) -> int: ...
    @property
    def head_tiles(self) -> int: ...


def serves(dims: tuple[int, int], dtype: torch.dtype, kv: Tensor) -> bool:
    """Whether the kernel reads pages like these, of one layer or of all; `dims`: of a latent, and what rotates."""
    return gathers(dims, dtype, kv) and fits(kv.shape[-3])


def gathers(dims: tuple[int, int], dtype: torch.dtype, kv: Tensor) -> bool:
    """Whether the kernel for tokens that rows chose reads them."""
    return (
        dims == DIMS
        and dtype in DTYPES
        and kv.dtype in (dtype, FP8)
        and kv.stride(-3) == WIDTH
        and kv.stride(0) % WIDTH == 0
        and why_not(kv.device) is None
    )


def fits(page_size: int) -> bool:
    """Whether pages are of a size that tiles are made of, or that is made of them."""
    return page_size % TILE_TOKENS == 0 or (page_size >= LEAST_PAGE and TILE_TOKENS % page_size == 0)


def constants(q_dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, page_rows: int) -> dict[str, Any]:
    """Return what kernels are compiled for, beside heads and requests; `page_rows`: from a page to the next."""
    gathered = chosen_constants(q_dtype, kv_dtype, page_size, page_rows)
    return {**gathered, "BOX_TOKENS": min(page_size, TILE_TOKENS)}


def chosen_constants(q_dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, page_rows: int) -> dict[str, Any]:
    """Return that of the kernel that gathers tokens."""
    narrow = kv_dtype == FP8
    return {
        "PAGE_SIZE": page_size,
        "PAGE_ROWS": page_rows,
        "STAGES": 1 if narrow else 2,  # shared memory has room for two tiles of products' operands
        "NARROW": narrow,
        "DTYPE": product_dtype(q_dtype, kv_dtype),
        **LAUNCH,
    }


def decode(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    shape: Heads,
    score_scale: float,
    value_scale: float,
    num_splits: int,
    early: bool = False,
) -> None:
    """Leave what shares have of requests in `parts`, or in `out` where a share has all of one."""
    _kernels().hopper_latent_decode_kernel[(num_splits * shape.head_tiles,)](
        q,
        _pool(kv_layer),
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
        HEADS=shape.num_heads,
        HEAD_TILES=shape.head_tiles,
        BATCH=batch_block(len(q)),
        **constants(q.dtype, kv_layer.dtype, kv_layer.shape[2], kv_layer.stride(0) // WIDTH),
        EARLY=early,
        num_warps=4,
    )


def extend(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    out: Tensor,
    shape: Heads,
    score_scale: float,
    value_scale: float,
) -> None:
    """Do what `latent_extend` does."""
    batch = len(seq_lens)
    _kernels().hopper_latent_extend_kernel[(len(q) * shape.num_heads // NUM_ROWS + batch,)](
        q,
        _pool(kv_layer),
        page_table,
        seq_lens,
        extend_starts,
        out,
        batch,
        q.stride(0),
        out.stride(0),
        page_table.stride(0),
        score_scale,
        value_scale,
        HEADS=shape.num_heads,
        **constants(q.dtype, kv_layer.dtype, kv_layer.shape[2], kv_layer.stride(0) // WIDTH),
        num_warps=4,
    )


def attend_to_chosen(
    q: Tensor,
    kv_layer: Tensor,
    chosen: Tensor,
    lens: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    shape: Heads,
    score_scale: float,
    value_scale: float,
    num_parts: int,
) -> None:
    """Leave what parts of rows have in `parts`, or in `out` where one has all of a row."""
    _kernels().hopper_chosen_kernel[(len(q) * num_parts * shape.head_tiles,)](
        q,
        kv_layer,
        chosen,
        lens,
        out,
        *parts,
        q.stride(0),
        out.stride(0),
        chosen.stride(0),
        num_parts,
        score_scale,
        value_scale,
        HEADS=shape.num_heads,
        HEAD_TILES=shape.head_tiles,
        NUM_KEPT=chosen.shape[1],
        **chosen_constants(q.dtype, kv_layer.dtype, kv_layer.shape[2], kv_layer.stride(0) // WIDTH),
        num_warps=4,
    )


def _pool(kv_layer: Tensor) -> Any:
    """Return what the copy engine reads pages by: rows of all tokens, those of other layers among them."""
    num_pages, _, page_size, _, _ = kv_layer.shape
    rows = (num_pages - 1) * (kv_layer.stride(0) // WIDTH) + page_size
    box = [min(page_size, TILE_TOKENS), BOX]
    return _kernels().rows_by_boxes(kv_layer, [rows, WIDTH], box, narrow=kv_layer.dtype == FP8)


def _kernels() -> Any:
    from diptych.kernels.gpu.attention import hopper_latent_kernel

    return hopper_latent_kernel
