"""Attention of decode steps on a GPU: one new query a request, or a few that follow, over paged KV, in one launch.

It is bound by how fast KV is read. How the work is shared out is decided on the device from `seq_lens`, so that a CUDA
graph serves every context length, and no step needs a plan from the host. `docs/decisions` says why it is as it is.
Rule: what a launch depends on here (`Launch`, `num_splits`) is a pure function of shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.attention.decode_attention_kernel import PARTS, decode_attention_kernel
from diptych.kernels.gpu.grid import power_of_two
from diptych.kernels.row_groups import RowGroups

FP8: Final = torch.float8_e4m3fn
LOG2_E: Final = math.log2(math.e)
NO_WINDOW: Final = 1 << 30
MIN_HEADS: Final = 16  # rows of a tensor core's tile
MOST_LINES: Final = 32  # of it, where rows of a request share one
MIN_HALF: Final = 16  # its depth
REGISTERS: Final = 65536  # of a multiprocessor
WARP: Final = 32  # threads
FEW_REQUESTS: Final = 16  # so many at most wait for latencies, not for bandwidth
BATCH_BLOCK: Final = 256  # one compiled kernel for all larger batches up to this
PRODUCTS: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is launched for some shape."""

    block: int  # tokens a tile
    num_warps: int
    num_stages: int  # of the pipeline of tiles: one less are on their way
    programs_per_sm: int  # that run at once: each may have so much of the registers

    @property
    def max_registers(self) -> int:
        """The most registers of a thread, in eights as they are given."""
        return min(255, REGISTERS // (WARP * self.num_warps * self.programs_per_sm) // 8 * 8)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What programs tell each other. One for all launches of a stream; none of them may run beside another."""

    values: Tensor  # [slots, num_kv_heads, 2, group of all rows, half_block], float32
    maxima: Tensor  # [slots, num_kv_heads, rows], float32
    sums: Tensor  # like maxima
    arrived: Tensor  # [batch, num_kv_heads], int32; zeros between launches


def launch_for(head_dim: int, kv_dtype: torch.dtype, group: int, batch: int) -> Launch:
    """Return the launch for `group` heads a KV head; `bench/gpu/tune_decode_attention.py` compares others.

    Few requests are read in larger tiles by fewer programs: every part of a request costs time at the end.
    """
    block = max(16, min(64, 8192 // power_of_two(head_dim)))  # 32 KiB of 16-bit keys and values, or less
    if kv_dtype == torch.float32 or group > MIN_HEADS:
        return Launch(max(16, block // 2), num_warps=4, num_stages=3, programs_per_sm=2)
    if batch <= FEW_REQUESTS:
        return Launch(2 * block, num_warps=4, num_stages=3 if kv_dtype == FP8 else 2, programs_per_sm=2)
    return Launch(block, num_warps=4, num_stages=3, programs_per_sm=3 if kv_dtype == FP8 else 2)


def rows_together(group: int) -> int:
    """Return how many rows of `group` heads a KV head share a tile of queries: as many as cost next to nothing."""
    return max(1, max(MIN_HEADS, min(MOST_LINES, 4 * group)) // group)


def num_splits(
    batch: int, num_kv_heads: int, max_seq_len_bound: int, num_sms: int, programs_per_sm: int = 3, block: int = 64
) -> int:
    """Return into how many shares the tokens of a batch are cut for each KV head: as many as run at once.

    More would wait for the first to end; shares need no number for each request, as a request may have many or a part
    of one. `max_seq_len_bound`: no request is longer while this number is used.
    """
    at_once = max(1, num_sms * programs_per_sm // num_kv_heads)
    return max(1, min(at_once, batch * -(-max_seq_len_bound // block)))


def decode_workspace(
    batch: int, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, device: torch.device, rows: int = 1
) -> DecodeWorkspace:
    """Allocate for up to `batch` requests and `num_splits` shares; `rows` of a request are computed together."""
    group, slots = rows * num_heads // num_kv_heads, 2 * num_splits
    stats = (slots, num_kv_heads, _rows(group))
    return DecodeWorkspace(
        values=torch.empty(slots, num_kv_heads, 2, group, _half_block(head_dim), device=device),
        maxima=torch.empty(stats, device=device),
        sums=torch.empty(stats, device=device),
        arrived=torch.zeros(batch, num_kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    num_splits: int,
    launch: Launch | None = None,
    groups: RowGroups | None = None,
) -> None:
    """Attend `q[batch, num_heads, head_dim]` to the KV of each request, the new token's included, into `out` like `q`.

    `kv_layer`: `[num_pages, 2, page_size, num_kv_heads, head_dim]`, a layer of the pool; FP8 stands for that times
    `k_scale` and `v_scale`. `page_table`: int32 `[batch, max_pages]`; `seq_lens`: int32 `[batch]`, 0: nothing is read
    and `out` is 0. A request sees its last `window` tokens, 0: all, or, if `chunked`, its last chunk of so many. Scores
    `s` become `softcap * tanh(s / softcap)`, 0: they stay. `sinks`, float32 `[num_heads]`: a score of each head that
    takes part in its softmax and has no value. FP8 is multiplied as float16, where queries beyond 65504 overflow.

    With `groups`, of at most `rows_together`, requests beside each other are rows of one: each is a token longer.

    Rows of `q` and `out` may have any stride, heads are one after the other. Runs on the current stream, allocates
    nothing once compiled, and may be captured: a replay reads the `seq_lens` of its own time.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[3]
    _check(q, kv_layer, page_table, seq_lens, out)
    assert workspace.arrived.shape[0] >= batch, (workspace.arrived.shape, batch)
    assert workspace.values.shape[0] >= 2 * num_splits, (workspace.values.shape, num_splits)
    launch = launch or launch_for(head_dim, kv_layer.dtype, num_heads // num_kv_heads, batch)
    kv = kv_layer.view(torch.int16) if kv_layer.dtype == FP8 else kv_layer
    score_scale = scale * k_scale * (2 / softcap if softcap else 1) * LOG2_E
    rows = 1 if groups is None else rows_together(num_heads // num_kv_heads)
    assert workspace.values.shape[3] >= rows * num_heads // num_kv_heads, (workspace.values.shape, rows)
    num_workers = min(num_splits, PARTS.value * batch)  # to add up more parts of a request takes longer than they save
    with torch.cuda.device_of(q):
        decode_attention_kernel[(num_workers * num_kv_heads,)](
            q,
            kv,
            page_table,
            seq_lens,
            out,
            workspace.values,
            workspace.maxima,
            workspace.sums,
            workspace.arrived,
            sinks,
            None if groups is None else groups.firsts,
            None if groups is None else groups.counts,
            batch,
            q.stride(0),
            out.stride(0),
            page_table.stride(0),
            kv.stride(0),
            kv.stride(1),
            kv.stride(2),
            num_workers,
            window or NO_WINDOW,
            score_scale,
            v_scale,
            softcap * LOG2_E,
            **constants(q.shape, kv_layer.shape, q.dtype, kv_layer.dtype, softcap != 0, launch, rows),
            SINKS=sinks is not None,
            CHUNKED=chunked,
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=launch.num_warps,
            maxnreg=launch.max_registers,
        )


def constants(
    q_shape: Sequence[int],
    kv_shape: Sequence[int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capped: bool,
    launch: Launch,
    rows: int = 1,
) -> dict[str, Any]:
    """Return what a kernel is compiled for: shapes of `q` and of a layer, their dtypes, whether there is a soft cap."""
    batch, num_heads, head_dim = q_shape
    group = num_heads // kv_shape[3]
    return {
        "NUM_KV_HEADS": kv_shape[3],
        "GROUP": group,
        "ROWS": rows,
        "GROUP_BLOCK": power_of_two(rows * group),
        "HEADS": _rows(rows * group),
        "HALF": head_dim // 2,
        "HALF_BLOCK": _half_block(head_dim),
        "PAGE_SIZE": kv_shape[2],
        "BLOCK": launch.block,
        "BATCH": batch_block(batch),
        "PAIRED": kv_dtype == FP8,
        "CAPPED": capped,
        "DTYPE": product_dtype(dtype, kv_dtype),
        "STAGES": launch.num_stages,
    }


def _check(q: Tensor, kv_layer: Tensor, page_table: Tensor, seq_lens: Tensor, out: Tensor) -> None:
    (batch, num_heads, head_dim), (_, two, _, num_kv_heads, kv_dim) = q.shape, kv_layer.shape
    assert (two, kv_dim, head_dim % 2, num_heads % num_kv_heads) == (2, head_dim, 0, 0), (q.shape, kv_layer.shape)
    assert q.stride()[1:] == out.stride()[1:] == kv_layer.stride()[3:] == (head_dim, 1), (q.stride(), out.stride())
    assert out.shape == q.shape, out.shape
    assert page_table.dtype == seq_lens.dtype == torch.int32, (page_table.dtype, seq_lens.dtype)
    assert (len(page_table), len(seq_lens)) == (batch, batch), (page_table.shape, seq_lens.shape)
    assert (page_table.stride(1), seq_lens.stride(0)) == (1, 1), (page_table.stride(), seq_lens.stride())


def _rows(group: int) -> int:
    return max(MIN_HEADS, power_of_two(group))


def _half_block(head_dim: int) -> int:
    return max(MIN_HALF, power_of_two(head_dim // 2))


def batch_block(batch: int) -> int:
    """How many requests a kernel is compiled for that reads the lengths of all at once."""
    return FEW_REQUESTS if batch <= FEW_REQUESTS else max(BATCH_BLOCK, power_of_two(batch))


def product_dtype(q: torch.dtype, kv: torch.dtype) -> tl.dtype:
    """What tensor cores multiply. FP8 is exact in float16, an instruction for two; to bfloat16 it takes three more."""
    if torch.float32 in (q, kv):
        return PRODUCTS[torch.float32]
    return PRODUCTS[torch.float16 if kv == FP8 else kv]


def reference_decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the same `[batch, num_heads, head_dim]` of `dtype`, which it is computed in, by plain torch."""
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    bytes_ = kv_layer.view(torch.uint8) if kv_layer.dtype == FP8 else kv_layer  # torch indexes no FP8
    group, page_size = q.shape[1] // kv_layer.shape[3], kv_layer.shape[2]
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = page_table[request, : -(-seq_len // page_size)].long()
        kv = bytes_[pages].view(kv_layer.dtype).to(dtype)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
        keys, values = kv.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :seq_len].repeat_interleave(group, dim=1)
        first = (seq_len - 1) // window * window if chunked and seq_len else seq_len - window
        seen = slice(max(0, first) if window else 0, seq_len)
        scores = (keys[:, seen] @ q[request, :, :, None].to(dtype))[..., 0] * (scale * k_scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if seq_len:
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(dtype)[:, None]], dim=1)
            weights = scores.softmax(dim=-1)[:, : seq_len - seen.start]
            out[request] = (weights[:, None] @ values[:, seen])[:, 0] * v_scale
    return out
