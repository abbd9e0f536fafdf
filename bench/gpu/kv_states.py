"""A paged KV pool with requests in it, as the kernels of attention take them: Llama-3-8B's heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

NUM_HEADS: Final = 32
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 128
PAGE_SIZE: Final = 16
SCALE: Final = HEAD_DIM**-0.5
LAYERS: Final = (4, 32)  # of a pool, fewest and most: enough that the L2 cache holds none of them for the next round
POOL_NBYTES: Final = 1 << 30
TEMPLATE_PAGES: Final = 64  # of random numbers, repeated


@dataclass(frozen=True, slots=True)
class States:
    """Requests of equal length whose pages are scattered over the pool."""

    kv: Tensor  # [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]
    page_table: Tensor  # [batch_size, max_pages], int32
    seq_lens: Tensor  # [batch_size], int32
    seq_len: int

    @property
    def layers(self) -> list[Tensor]:
        """A strided view of each, `[num_pages, 2, page_size, num_kv_heads, head_dim]`."""
        return list(self.kv.unbind(1))

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)

    @property
    def layer_nbytes(self) -> int:
        """Keys and values that attention reads in a layer."""
        return 2 * self.batch_size * self.seq_len * NUM_KV_HEADS * HEAD_DIM * self.kv.itemsize


def make_states(batch_size: int, seq_len: int, dtype: torch.dtype) -> States:
    """Fill a pool on the current GPU with random keys and values."""
    pages_each = -(-seq_len // PAGE_SIZE)
    num_pages = batch_size * pages_each
    page_nbytes = 2 * PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    num_layers = max(LAYERS[0], min(LAYERS[1], POOL_NBYTES // (num_pages * page_nbytes)))
    shape = (num_layers, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    kv = torch.empty(num_pages, *shape, dtype=dtype, device="cuda")
    template = torch.randn(TEMPLATE_PAGES, *shape, device="cuda").to(dtype).view(torch.uint8)
    for start in range(0, num_pages, TEMPLATE_PAGES):
        part = kv[start : start + TEMPLATE_PAGES].view(torch.uint8)
        part.copy_(template[: len(part)])
    table = torch.randperm(num_pages, device="cuda").to(torch.int32).view(batch_size, pages_each)
    seq_lens = torch.full((batch_size,), seq_len, dtype=torch.int32, device="cuda")
    return States(kv, table, seq_lens, seq_len)


def random_queries(num_tokens: int) -> Tensor:
    """`[num_tokens, num_heads, head_dim]`, bfloat16."""
    return torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
