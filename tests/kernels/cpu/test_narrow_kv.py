"""Keys and values in two bytes or one: stored as torch rounds them, and read as the floats that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.paged_attention import AttentionLayer, Heads, PagedAttention, Tokens

DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
HEADS = [Heads(9, 3, 64), Heads(4, 1, 128), Heads(2, 2, 80), Heads(4, 2, 20), Heads(4, 1, 48, 32), Heads(5, 1, 44, 30)]
NUM_PAGES, PAGE_SIZE, NUM_LAYERS, LAYER = 40, 8, 2, 1
CHUNKS = [200, 1, 1, 67, 1]  # of one request


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def states(heads: Heads, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, heads.num_states * heads.head_dim, generator=torch.Generator().manual_seed(seed)) * 3


def still(heads: Heads) -> AttentionLayer:
    """A layer that turns nothing: what is stored is what came in."""
    half = heads.head_dim // 2
    rope = torch.stack([torch.ones(512, half), torch.zeros(512, half)], dim=1)
    return AttentionLayer(LAYER, rope, scale=heads.head_dim**-0.5)


def empty_pool(heads: Heads, dtype: torch.dtype) -> Tensor:
    shape = (NUM_PAGES, NUM_LAYERS, heads.num_planes, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    return torch.full(shape, torch.nan).to(dtype)


def attend(heads: Heads, kv: Tensor, qkv: Tensor, chunks: list[int]) -> Tensor:
    """Compute one request chunk by chunk."""
    pages = np.random.default_rng(0).permutation(NUM_PAGES).astype(np.int32)
    out, start, layer = torch.empty(len(qkv), heads.num_heads * heads.value_dim), 0, still(heads)
    for chunk in chunks:
        positions = np.arange(start, start + chunk)
        slots = pages[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
        step = PagedAttention(heads, kv, Tokens(positions, slots, np.array([chunk]), pages[None]))
        run = step.decode if chunk == 1 else step.extend
        run(qkv[start : start + chunk].clone(), layer, out[start : start + chunk])
        start += chunk
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_keys_and_values_are_stored_as_torch_rounds_them(heads: Heads, dtype: torch.dtype) -> None:
    qkv = states(heads, 100) * 10.0 ** torch.randint(-6, 4, (100, 1), generator=torch.Generator().manual_seed(1))
    wide, narrow = empty_pool(heads, torch.float32), empty_pool(heads, dtype)
    for kv in (wide, narrow):
        attend(heads, kv, qkv, [90, 1, 9])
    written = wide[:, LAYER].isfinite()
    assert int(written.sum()) == 100 * heads.num_planes * heads.num_kv_heads * heads.head_dim
    assert torch.equal(narrow[:, LAYER].float()[written], rounded(wide[:, LAYER], dtype).float()[written])
    assert narrow[:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_has_the_bits_of_the_widened_pool(heads: Heads, dtype: torch.dtype, num_threads: int) -> None:
    qkv = rounded(states(heads, sum(CHUNKS)), dtype).float()  # so that storing rounds nothing
    expected = attend(heads, empty_pool(heads, torch.float32), qkv, CHUNKS)
    assert torch.equal(attend(heads, empty_pool(heads, dtype), qkv, CHUNKS), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS[:2])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(heads: Heads, dtype: torch.dtype) -> None:
    qkv = states(heads, 150)
    whole = attend(heads, empty_pool(heads, dtype), qkv, [150])
    for chunks in ([1] * 150, [64, 86], [1, 99, 50]):
        assert torch.equal(attend(heads, empty_pool(heads, dtype), qkv, chunks), whole)
