"""flashinfer's kernels on the same pages; they read the layers' strided views without a copy.

Its workspace is planned once for all layers, as a serving engine does once a step. Raises whatever it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, PAGE_SIZE, SCALE, States

WORKSPACE_NBYTES: Final = 256 << 20


def decode_runs(states: States, q: torch.Tensor) -> list[Callable[[], object]]:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_pages(states),
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        q_data_type=q.dtype,
        kv_data_type=states.kv.dtype,
        sm_scale=SCALE,
    )
    return _runs(wrapper, states, q)


def extend_runs(states: States, q: torch.Tensor, new: int) -> list[Callable[[], object]]:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    starts = torch.arange(states.batch_size + 1, dtype=torch.int32, device="cuda") * new
    wrapper.plan(
        starts,
        *_pages(states),
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=states.kv.dtype,
        sm_scale=SCALE,
    )
    return _runs(wrapper, states, q)


def latent_decode_runs(
    q: torch.Tensor,
    layers: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rank: int,
    scale: float,
) -> list[Callable[[], object]]:
    """Over latents of `rank` and what rotates behind them; `layers` as `latent_decode` reads them, of 16 bits.

    Requests have as many pages as the table is wide.
    """
    import flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace())
    batch_size, pages_each = page_table.shape
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        starts,
        starts * pages_each,
        page_table.flatten(),
        seq_lens,
        q.shape[1],
        rank,
        q.shape[2] - rank,
        layers[0].shape[2],
        False,  # one query each: there is nothing behind it
        scale,
        q.dtype,
        layers[0].dtype,
    )
    out = torch.empty_like(q[..., :rank], memory_format=torch.contiguous_format)

    def run(layer: torch.Tensor) -> Callable[[], object]:
        pages = layer[:, 0, :, 0]
        return lambda: wrapper.run(q[..., :rank], q[..., rank:], pages[..., :rank], pages[..., rank:], out=out)

    return [run(layer) for layer in layers]


def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device="cuda")


def _pages(states: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each request's pages start, all pages, and how many tokens are in each last page."""
    batch_size, pages_each = states.page_table.shape
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device="cuda") * pages_each
    last = torch.full((batch_size,), (states.seq_len - 1) % PAGE_SIZE + 1, dtype=torch.int32, device="cuda")
    return starts, states.page_table.flatten(), last


def _runs(wrapper: Any, states: States, q: torch.Tensor) -> list[Callable[[], object]]:
    out = torch.empty_like(q)

    def run(layer: torch.Tensor) -> Callable[[], object]:
        return lambda: wrapper.run(q, (layer[:, 0], layer[:, 1]), out=out)

    return [run(layer) for layer in states.layers]
