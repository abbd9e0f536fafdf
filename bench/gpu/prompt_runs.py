"""Prompt attention on pools of `kv_states`, one run a layer: ours for Hopper, FlashAttention-3 and torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, States
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from diptych.kernels.gpu.attention.expand_pages import expand_pages, expanded_table
from diptych.kernels.gpu.attention.extend_attention import extend_attention
from diptych.kernels.gpu.attention.prompt_attention import FP8, TILE, PromptTile, PromptWork, prompt_attention
from diptych.kernels.gpu.attention.split_extend_attention import SplitWorkspace, split_extend_attention

Run = Callable[[], object]


def flops(batch_size: int, prefix: int, new: int) -> float:
    """Return those of two products of each query with the keys that it sees."""
    return 4 * batch_size * NUM_HEADS * HEAD_DIM * new * (prefix + (new + 1) / 2)


def starts(batch_size: int, new: int) -> torch.Tensor:
    return torch.arange(batch_size + 1, dtype=torch.int32, device="cuda") * new


def pointer_runs(states: States, q: torch.Tensor, new: int) -> list[Run]:
    """By `extend_attention`."""
    begins, out = starts(states.batch_size, new), torch.empty_like(q)

    def run(layer: torch.Tensor) -> Run:
        return lambda: extend_attention(
            q, layer, states.page_table, states.seq_lens, begins, out, max_extend_len=new, scale=SCALE
        )

    return [run(layer) for layer in states.layers]


def split_runs(states: States, q: torch.Tensor, new: int) -> list[Run]:
    """By `split_extend_attention`."""
    begins, out = starts(states.batch_size, new), torch.empty_like(q)
    workspace = SplitWorkspace.allocate(HEAD_DIM, q.device)
    attend = partial(split_extend_attention, max_extend_len=new, longest=states.seq_len, scale=SCALE)

    def run(layer: torch.Tensor) -> Run:
        return lambda: attend(q, layer, states.page_table, states.seq_lens, begins, out, workspace)

    return [run(layer) for layer in states.layers]


def hopper_runs(states: States, q: torch.Tensor, new: int, tile: PromptTile = TILE) -> list[Run]:
    """By `prompt_attention`; FP8 is expanded in each run, as a layer does it."""
    begins, out = starts(states.batch_size, new), torch.empty_like(q)
    lens = np.full(states.batch_size, new), np.full(states.batch_size, states.seq_len)
    work = PromptWork.of(*lens, states.layers[0], NUM_HEADS, tile)

    def attend(layer: torch.Tensor, table: torch.Tensor) -> None:
        prompt_attention(q, layer, table, states.seq_lens, begins, out, work, scale=SCALE, tile=tile)

    if states.kv.dtype != FP8:
        return [lambda layer=layer: attend(layer, states.page_table) for layer in states.layers]  # type: ignore[misc]
    new_table = expanded_table(lens[1], tile.keys)
    shape = (int(new_table.max()) + 1, 2, tile.keys, NUM_KV_HEADS, HEAD_DIM)
    pool, table = torch.empty(shape, dtype=q.dtype, device="cuda"), torch.from_numpy(new_table).cuda()

    def run(layer: torch.Tensor) -> Run:
        def both() -> None:
            expand_pages(layer, states.page_table, states.seq_lens, pool, table)
            attend(pool, table)

        return both

    return [run(layer) for layer in states.layers]


def flash_attention_3_runs(states: States, q: torch.Tensor, new: int) -> list[Run]:
    """On the same pages. Raises `ImportError` where it is not installed."""
    from flash_attn_interface import flash_attn_with_kvcache

    queries = q.view(states.batch_size, new, NUM_HEADS, HEAD_DIM)
    where = {"cache_seqlens": states.seq_lens, "page_table": states.page_table, "causal": True, "softmax_scale": SCALE}

    def run(layer: torch.Tensor) -> Run:
        return lambda: flash_attn_with_kvcache(queries, layer[:, 0], layer[:, 1], **where)

    return [run(layer) for layer in states.layers]


def sdpa_runs(states: States, q: torch.Tensor, new: int) -> list[Run]:
    """By torch's SDPA in cuDNN, over contiguous keys and values of no pool."""
    shapes = ((NUM_HEADS, new), (NUM_KV_HEADS, states.seq_len), (NUM_KV_HEADS, states.seq_len))
    queries, keys, values = (
        torch.randn(states.batch_size, *shape, HEAD_DIM, dtype=q.dtype, device="cuda") for shape in shapes
    )
    mask = {"is_causal": True} if new == states.seq_len else {"attn_mask": causal_lower_right(new, states.seq_len)}

    def run() -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True, **mask)

    return [run]
