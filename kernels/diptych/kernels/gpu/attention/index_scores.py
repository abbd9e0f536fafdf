"""Scores of an indexer on a GPU: how much each new token wants each token before it, over paged index keys.

A score is the sum over index heads of a weight times the product of query and key, where negative products count as 0
(DeepSeek V3.2, arXiv 2512.02556). It is bound by how fast index keys are read, once for all heads. Rule: a score is
computed in shapes that depend on nothing but the model, so that its bits depend neither on the batch nor on chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.attention.decode_attention import FP8, MIN_HALF, MIN_HEADS, product_dtype
from diptych.kernels.gpu.attention.decode_attention_kernel import load_halves, page_of
from diptych.kernels.gpu.attention.latent_attention_kernels import load_query
from diptych.kernels.gpu.grid import cdiv, power_of_two

MAX_ROWS: Final = 256  # of a launch
BLOCK: Final = 64  # keys a tile
NUM_WARPS: Final = 4
STAGES: Final = 3  # tiles on their way from memory, and one more
PROGRAMS_PER_SM: Final = 3


@dataclass(frozen=True, slots=True)
class IndexShape:
    """What the kernel is compiled for."""

    num_heads: int
    head_dim: int
    num_kept: int  # rows that see no more need no scores
    page_size: int
    dtype: torch.dtype  # of queries and weights
    kv_dtype: torch.dtype

    @property
    def size(self) -> int:
        """The numbers of a token: queries, a key, weights."""
        return (self.num_heads + 1) * self.head_dim + self.num_heads

    @property
    def constants(self) -> dict[str, Any]:
        half = self.head_dim // 2
        return {
            "NUM_HEADS": self.num_heads,
            "HEADS": max(MIN_HEADS, power_of_two(self.num_heads)),
            "HALF": half,
            "HALF_BLOCK": max(MIN_HALF, power_of_two(half)),
            "NUM_KEPT": self.num_kept,
            "PAGE_SIZE": self.page_size,
            "BLOCK": BLOCK,
            "MAX_ROWS": MAX_ROWS,
            "PAIRED": self.kv_dtype == FP8,
            "DTYPE": product_dtype(self.dtype, self.kv_dtype),
            "STAGES": STAGES,
        }


@dataclass(frozen=True, slots=True, eq=False)
class IndexRows:
    """New tokens that choose, each for itself."""

    page_table: Tensor  # int32 [num_requests, max_pages]
    requests: Tensor  # int32 [num_rows]: whose pages a row sees
    lens: Tensor  # int32 [num_rows]: how many tokens it sees, itself included; 0: padding

    def part(self, rows: slice) -> IndexRows:
        return IndexRows(self.page_table, self.requests[rows], self.lens[rows])


def index_scores(
    index: Tensor, keys_layer: Tensor, rows: IndexRows, scores: Tensor, shape: IndexShape, *, num_programs: int
) -> None:
    """Write the scores of what up to MAX_ROWS rows see to the front of `scores`, float32 `[num_rows, max_len]`.

    `index` `[num_rows, shape.size]`: rotated queries, a key, and weights; rows may have any stride. `keys_layer`
    `[num_pages, 1, page_size, 1, head_dim]` is a layer of index keys that has the new tokens', too. Rows that see no
    more than `num_kept` tokens are skipped. Shared out among `num_programs` on the device, by lengths; may be captured.
    """
    _check(index, keys_layer, rows, scores, shape)
    keys = keys_layer.view(torch.int16) if keys_layer.dtype == FP8 else keys_layer
    with torch.cuda.device_of(index):
        index_scores_kernel[(num_programs,)](
            index,
            keys,
            rows.page_table,
            rows.requests,
            rows.lens,
            scores,
            len(index),
            index.stride(0),
            rows.page_table.stride(0),
            keys.stride(0),
            keys.stride(2),
            scores.stride(0),
            **shape.constants,
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=NUM_WARPS,
        )


def index_programs(num_rows: int, max_len: int, num_sms: int) -> int:
    """Return among how many programs the keys of so many rows are shared out: as many as run at once."""
    return max(1, min(num_sms * PROGRAMS_PER_SM, num_rows * cdiv(max_len, BLOCK)))


def _check(index: Tensor, keys_layer: Tensor, rows: IndexRows, scores: Tensor, shape: IndexShape) -> None:
    assert shape.head_dim % 2 == 0, shape
    assert index.shape[1] == shape.size, (index.shape, shape)
    assert index.stride(1) == keys_layer.stride(4) == scores.stride(1) == 1, (index.stride(), keys_layer.stride())
    assert keys_layer.shape[1:] == (1, shape.page_size, 1, shape.head_dim), (keys_layer.shape, shape)
    assert len(index) == len(rows.requests) == len(rows.lens) <= min(MAX_ROWS, len(scores)), (index.shape, scores.shape)
    assert scores.dtype == torch.float32, scores.dtype
    dtypes = {each.dtype for each in (rows.page_table, rows.requests, rows.lens)}
    assert dtypes == {torch.int32}, dtypes


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "requests", "lens"],
)
def index_scores_kernel(
    index,  # [num_rows, (NUM_HEADS + 1) * 2 * HALF + NUM_HEADS]
    keys,  # [num_pages, page_size, 2 * HALF], in int16 pairs if PAIRED
    page_table,
    requests,
    lens,
    scores,
    num_rows,
    index_stride,
    table_stride,
    page_stride,  # strides in entries of `keys`
    token_stride,
    scores_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # that and more: rows of a tile
    HALF: tl.constexpr,  # half of the dimensions of a key
    HALF_BLOCK: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,  # of products
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """The tiles of all rows are a line, which is cut into equal shares, as in `decode_attention_kernel.py`."""
    rows, head, half = tl.arange(0, MAX_ROWS), tl.arange(0, HEADS), tl.arange(0, HALF_BLOCK)
    row_lens = tl.load(lens + rows, mask=rows < num_rows, other=0)
    ends = tl.cumsum(tl.where(row_lens > NUM_KEPT, tl.cdiv(row_lens, BLOCK), 0))
    num_tiles = tl.max(ends)
    share = tl.cdiv(num_tiles, tl.num_programs(0))
    tile = tl.program_id(0) * share
    share_end = tl.minimum(tile + share, num_tiles)
    while tile < share_end:
        row = tl.sum((ends <= tile).to(tl.int32))
        row_end = tl.sum(tl.where(rows == row, ends, 0))
        num_seen = tl.load(lens + row)
        next_tile = tl.minimum(share_end, row_end)
        start = tile - row_end + tl.cdiv(num_seen, BLOCK)
        stop = start + next_tile - tile
        own = index + row.to(tl.int64) * index_stride
        q_0, q_1 = load_query(own + head * (2 * HALF), head < NUM_HEADS, half, HALF, PAIRED, DTYPE)
        weights = tl.load(own + (NUM_HEADS + 1) * 2 * HALF + head, mask=head < NUM_HEADS, other=0.0).to(tl.float32)
        pages = page_table + tl.load(requests + row).to(tl.int64) * table_stride
        page = page_of(pages, start, num_seen, PAGE_SIZE, BLOCK)
        for block in tl.range(start, stop, num_stages=STAGES):
            token = block * BLOCK + tl.arange(0, BLOCK)
            places = keys + (page.to(tl.int64) * page_stride + token % PAGE_SIZE * token_stride)[:, None]
            page = page_of(pages, block + 1, num_seen, PAGE_SIZE, BLOCK)  # ahead: the next tile's copies need it
            inside = (token < num_seen)[:, None] & (half < HALF)[None, :]
            k_0, k_1 = load_halves(places + half[None, :], inside, HALF, PAIRED, COMPILED)
            products = tl.dot(q_0, tl.trans(k_0.to(DTYPE)), input_precision="ieee")
            products = tl.dot(q_1, tl.trans(k_1.to(DTYPE)), products, input_precision="ieee")
            found = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
            tl.store(scores + row.to(tl.int64) * scores_stride + token, found, mask=token < num_seen)
        tile = next_tile


def reference_index_scores(index: Tensor, keys_layer: Tensor, rows: IndexRows, shape: IndexShape) -> list[Tensor]:
    """Return the scores of each row, float64 `[num_seen]`."""
    found, numbers = [], (shape.num_heads + 1) * shape.head_dim
    stored = keys_layer.view(torch.uint8) if keys_layer.dtype == FP8 else keys_layer  # torch indexes no FP8
    for own, request, num_seen in zip(index.double(), rows.requests.tolist(), rows.lens.tolist(), strict=True):
        pages = rows.page_table[request, : cdiv(num_seen, shape.page_size)].long()
        keys = stored[pages].view(keys_layer.dtype).double().flatten(0, 3)[:num_seen]
        queries = own[:numbers].view(-1, shape.head_dim)[:-1]
        found.append(own[numbers:] @ (queries @ keys.T).relu())
    return found
