"""Attention to latents on a GPU, over paged KV: of decode steps and of new tokens of prompts.

A token keeps one vector for all heads: a latent, which is key and value, and behind it the rotated part of its key. All
heads share what is read of it. Nothing is decided on the host but launches, by shapes and dtypes alone, so steps can be
recorded in CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
from torch import Tensor

from diptych.kernels.gpu.attention import hopper_latent
from diptych.kernels.gpu.attention.decode_attention import (
    FEW_REQUESTS,
    FP8,
    LOG2_E,
    MIN_HALF,
    MIN_HEADS,
    batch_block,
    product_dtype,
)
from diptych.kernels.gpu.attention.latent_attention_kernels import (
    latent_decode_kernel,
    latent_extend_kernel,
    latent_merge_kernel,
)
from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.hopper import SHARED_NBYTES

LEAST_BLOCK: Final = 16  # tokens: the depth of a tensor core's tile
Parts = tuple[Tensor, Tensor, Tensor]  # values, maxima and sums that shares leave


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program goes through tokens; the numbers below were the fastest on an H200 (bench/results/gpu.md)."""

    block: int  # tokens at a time
    num_warps: int
    stages: int  # blocks on their way from memory
    programs_per_sm: int = 1


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What kernels are compiled for."""

    num_heads: int
    rank: int  # of the latent
    rope_dim: int
    page_size: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype
    shared_nbytes: int = SHARED_NBYTES  # of a program where it is launched
    starts_early: bool = False  # whether a launch there may begin while the one before it runs

    @property
    def max_rows(self) -> int:
        """Rows of a tile at most: the sums of values fill the registers."""
        return 16 if torch.float32 in (self.dtype, self.kv_dtype) else 64

    @property
    def head_tiles(self) -> int:
        """Equal tiles of a token's heads, as few as there can be."""
        tiles = cdiv(self.num_heads, self.max_rows)
        while self.num_heads % tiles:
            tiles += 1
        return tiles

    @property
    def decode_rows(self) -> int:
        """Rows of a decode step's tile: heads, and padding."""
        return max(MIN_HEADS, power_of_two(self.num_heads // self.head_tiles))

    @property
    def decode_tile(self) -> Tile:
        if self.max_rows == MIN_HEADS:
            return self._fitting(Tile(16, 4, 3), self.decode_rows)
        if self.decode_rows > MIN_HEADS:
            return self._fitting(Tile(64, 8, 3 if self.kv_dtype == FP8 else 2), self.decode_rows)
        return self._fitting(Tile(64, 4, 3, programs_per_sm=2 if self.kv_dtype == FP8 else 1), self.decode_rows)

    def tile_of(self, batch: int) -> Tile:
        """Return the tile of a step of so many requests: few of them wait for latencies, which more stages hide.

        Only where there is shared memory for them. It has as many tokens as `decode_tile`.
        """
        tile = self.decode_tile
        deeper = Tile(tile.block, tile.num_warps, 5)
        if batch > FEW_REQUESTS or tile.programs_per_sm == 1 or not self._fits(deeper, self.decode_rows):
            return tile
        return deeper

    @property
    def extend_tile(self) -> Tile:
        return self._fitting(Tile(16, 4, 3) if self.max_rows == MIN_HEADS else Tile(32, 8, 3), self.max_rows)

    def _fits(self, tile: Tile, rows: int) -> bool:
        """Whether a program has the shared memory: queries and weights, and all blocks but the one that is computed."""
        key_dim, product_nbytes = self.rank + self.rope_dim, 4 if self.max_rows == MIN_HEADS else 2
        blocks = (tile.stages - 1) * tile.block * key_dim * self.kv_dtype.itemsize
        return blocks + rows * (key_dim + tile.block) * product_nbytes <= self.shared_nbytes

    def _fitting(self, tile: Tile, rows: int) -> Tile:
        """Return the tile, or a smaller one that fits; the smallest has to. Small blocks still come ahead of time."""
        while not self._fits(tile, rows) and tile.block > LEAST_BLOCK:
            tile = replace(tile, block=tile.block // 2)
        while not self._fits(tile, rows) and tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        return tile

    def _constants(self, tile: Tile) -> dict[str, Any]:
        """Return what all kernels are compiled for."""
        half, rope_half = self.rank // 2, self.rope_dim // 2
        return {
            "HALF": half,
            "HALF_BLOCK": max(MIN_HALF, power_of_two(half)),
            "ROPE_HALF": rope_half,
            "ROPE_BLOCK": max(MIN_HALF, power_of_two(rope_half)),
            "PAGE_SIZE": self.page_size,
            "BLOCK": tile.block,
            "PAIRED": self.kv_dtype == FP8,
            "DTYPE": product_dtype(self.dtype, self.kv_dtype),
            "STAGES": tile.stages,
        }

    def decode_constants(self, batch: int) -> dict[str, Any]:
        tiles = {"HEAD_TILES": self.head_tiles, "GROUP": self.num_heads // self.head_tiles, "ROWS": self.decode_rows}
        return {**tiles, **self._constants(self.decode_tile), "BATCH": batch_block(batch)}

    def extend_constants(self) -> dict[str, Any]:
        return {"NUM_HEADS": self.num_heads, "ROWS": self.max_rows, **self._constants(self.extend_tile)}


@dataclass(frozen=True, slots=True)
class LatentWorkspace:
    """What shares of a request leave for the sum. One for all launches of a stream; none may run beside another."""

    values: Tensor  # [slots, num_heads, rank], float32
    maxima: Tensor  # [slots, num_heads]
    sums: Tensor  # like maxima

    @staticmethod
    def allocate(shape: LatentShape, num_splits: int, device: torch.device) -> LatentWorkspace:
        """Return one for up to `num_splits` shares."""
        values = torch.empty(2 * num_splits, shape.num_heads, shape.rank, device=device)
        maxima, sums = torch.empty(2, 2 * num_splits, shape.num_heads, device=device)
        return LatentWorkspace(values, maxima, sums)


def latent_splits(shape: LatentShape, batch: int, max_seq_len: int, num_sms: int) -> int:
    """Return into how many shares the tokens of a batch are cut for each tile of heads: as many as run at once."""
    tile = shape.tile_of(batch)
    at_once = max(1, num_sms * tile.programs_per_sm // shape.head_tiles)
    return max(1, min(at_once, batch * cdiv(max_seq_len, tile.block)))


@dataclass(frozen=True, slots=True)
class MergeLaunch:
    """What a program that adds up parts has."""

    dims: int
    parts: int  # that are read at once
    num_warps: int
    early: bool = False  # begins while shares are computed, and waits for them


def merge_launch(shape: LatentShape, batch: int, num_splits: int) -> MergeLaunch:
    """Many parts of a request are read at once, of fewer dimensions. By an H200's times.

    Batches between two powers of two have the launch of the larger one: a worker compiles that before it serves.
    """
    batch = power_of_two(max(1, batch))
    rank, parts = power_of_two(shape.rank), num_splits // batch + 2  # of requests of equal lengths
    early = shape.starts_early
    if parts <= 4:
        return MergeLaunch(rank, 2, 1, early)
    if parts <= 12:
        return MergeLaunch(rank, 8, 4, early)
    if parts <= 20:
        return MergeLaunch(min(128, rank), 16, 1, early)
    return MergeLaunch(min(128, rank), 64, 4, early) if parts <= 68 else MergeLaunch(min(64, rank), 128, 4, early)


def latent_decode(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    workspace: LatentWorkspace,
    shape: LatentShape,
    *,
    scale: float,
    kv_scale: float = 1.0,
    num_splits: int,
) -> None:
    """Attend `q[batch, num_heads, rank + rope_dim]` to what each request keeps, into `out[batch, num_heads, rank]`.

    `kv_layer` `[num_pages, 1, page_size, 1, rank + rope_dim]` is a layer of the pool and has the new token, too; FP8
    stands for that times `kv_scale`. `page_table`: int32 `[batch, max_pages]`; `seq_lens`: int32 `[batch]`, 0: nothing
    is read and `out` is 0. Rows of `q` and `out` may have any stride. Runs on the current stream, allocates nothing
    once compiled, and may be captured: a replay reads the `seq_lens` of its own time.
    """
    _check(q, kv_layer, page_table, seq_lens, out, shape)
    assert len(workspace.maxima) >= 2 * num_splits, (workspace.maxima.shape, num_splits)
    parts = workspace.values, workspace.maxima, workspace.sums
    attend = hopper_latent.decode if _pays_on_hopper(shape, kv_layer) else decode_anywhere
    scales, merge = (scale * kv_scale * LOG2_E, kv_scale), merge_launch(shape, len(q), num_splits)
    with torch.cuda.device_of(q):
        attend(q, kv_layer, page_table, seq_lens, out, parts, shape, *scales, num_splits, merge.early)
        merge_parts(parts, seq_lens, out, shape, kv_scale, num_splits, merge)


def _pays_on_hopper(shape: LatentShape, kv_layer: Tensor) -> bool:
    """Up to 16 heads wait for memory, and tiles of 16 rows are the faster ones; see bench/results/gpu.md."""
    return shape.decode_rows > MIN_HEADS and _serves(shape, kv_layer)


def _serves(shape: LatentShape, kv_layer: Tensor) -> bool:
    return hopper_latent.serves((shape.rank, shape.rope_dim), shape.dtype, kv_layer)


def decode_anywhere(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    parts: Parts,
    shape: LatentShape,
    score_scale: float,
    value_scale: float,
    num_splits: int,
    early: bool = False,
) -> None:
    """Leave what shares have of requests in `parts`, or in `out` where a share has all of one."""
    kv = _entries(kv_layer)
    latent_decode_kernel[(num_splits * shape.head_tiles,)](
        q,
        kv,
        page_table,
        seq_lens,
        out,
        *parts,
        len(q),
        q.stride(0),
        out.stride(0),
        page_table.stride(0),
        kv.stride(0),
        kv.stride(2),
        num_splits,
        score_scale,
        value_scale,
        **{**shape.decode_constants(len(q)), "STAGES": shape.tile_of(len(q)).stages},
        COMPILED=not triton.knobs.runtime.interpret,
        EARLY=early,
        num_warps=shape.decode_tile.num_warps,
    )


def merge_parts(
    parts: Parts,
    seq_lens: Tensor,
    out: Tensor,
    shape: LatentShape,
    value_scale: float,
    num_splits: int,
    launch: MergeLaunch,
) -> None:
    """Add up what shares left of requests, into `out`."""
    batch = len(seq_lens)
    latent_merge_kernel[(batch, shape.num_heads, cdiv(shape.rank, launch.dims))](
        *parts,
        seq_lens,
        out,
        batch,
        out.stride(0),
        num_splits,
        value_scale,
        NUM_HEADS=shape.num_heads,
        DIM=shape.rank,
        DIM_BLOCK=launch.dims,
        BLOCK=shape.decode_tile.block,
        BATCH=batch_block(batch),
        TOGETHER=launch.parts,
        EARLY=launch.early,
        launch_pdl=launch.early,
        num_warps=launch.num_warps,
    )


def latent_extend(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    out: Tensor,
    shape: LatentShape,
    *,
    scale: float,
    kv_scale: float = 1.0,
) -> None:
    """Do the same for any number of new tokens a request: a token sees itself and all before it.

    `extend_starts` int32 `[batch + 1]`: where each request's new tokens begin in `q`, the first at 0; rows behind the
    last of them are padding, and left alone.
    """
    _check(q, kv_layer, page_table, seq_lens, out, shape)
    attend = hopper_latent.extend if _serves(shape, kv_layer) else extend_anywhere
    tables = page_table, seq_lens, extend_starts
    with torch.cuda.device_of(q):
        attend(q, kv_layer, *tables, out, shape, scale * kv_scale * LOG2_E, kv_scale)


def extend_anywhere(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    out: Tensor,
    shape: LatentShape,
    score_scale: float,
    value_scale: float,
) -> None:
    """Do what `latent_extend` does."""
    batch, kv, constants = len(seq_lens), _entries(kv_layer), shape.extend_constants()
    latent_extend_kernel[(len(q) * shape.num_heads // constants["ROWS"] + batch,)](
        q,
        kv,
        page_table,
        seq_lens,
        extend_starts,
        out,
        batch,
        q.stride(0),
        out.stride(0),
        page_table.stride(0),
        kv.stride(0),
        kv.stride(2),
        score_scale,
        value_scale,
        **constants,
        COMPILED=not triton.knobs.runtime.interpret,
        num_warps=shape.extend_tile.num_warps,
    )


def reference_latent_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    *,
    rank: int,
    scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """Return the same as float64, `[extend_starts[batch], num_heads, rank]`, request by request."""
    starts, outputs = extend_starts.tolist(), []
    stored = kv_layer.view(torch.uint8) if kv_layer.dtype == FP8 else kv_layer  # torch indexes no FP8
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = page_table[request, : cdiv(seq_len, kv_layer.shape[2])].long()
        keys = stored[pages].view(kv_layer.dtype).double().flatten(0, 3)[:seq_len] * kv_scale
        queries = q[starts[request] : starts[request + 1]].double()
        scores = torch.einsum("qhd,kd->hqk", queries, keys) * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(seq_len - len(queries))
        outputs.append(torch.einsum("hqk,kd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), keys[:, :rank]))
    return torch.cat(outputs)


def _entries(kv_layer: Tensor) -> Tensor:
    return kv_layer.view(torch.int16) if kv_layer.dtype == FP8 else kv_layer


def _check(q: Tensor, kv_layer: Tensor, page_table: Tensor, seq_lens: Tensor, out: Tensor, shape: LatentShape) -> None:
    key_dim = shape.rank + shape.rope_dim
    assert (q.shape[1:], out.shape[1:]) == ((shape.num_heads, key_dim), (shape.num_heads, shape.rank)), (q.shape, shape)
    assert kv_layer.shape[1:] == (1, shape.page_size, 1, key_dim), (kv_layer.shape, shape)
    assert (shape.rank % 2, shape.rope_dim % 2) == (0, 0), shape
    assert q.stride()[1:] == (key_dim, 1), q.stride()
    assert out.stride()[1:] == (shape.rank, 1), out.stride()
    assert kv_layer.stride(4) == 1, kv_layer.stride()
    assert len(out) == len(q), (q.shape, out.shape)
    assert page_table.dtype == seq_lens.dtype == torch.int32, (page_table.dtype, seq_lens.dtype)
    assert (page_table.stride(1), seq_lens.stride(0)) == (1, 1), (page_table.stride(), seq_lens.stride())
