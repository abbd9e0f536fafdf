"""Which tokens are attended to where an indexer can't tell them apart. Models compare all else with transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_config import tiny_config
from torch import Tensor

from diptych.architectures.config import Indexer, Latent, Rope
from diptych.engine.attention.backend import AttentionBackend
from diptych.engine.attention.cpu_sparse_backend import CpuSparseAttention
from diptych.engine.attention.layer_constants import kv_scales
from diptych.engine.attention.sparse_attention import SparseAttention
from diptych.engine.attention.staged_batch import stage
from diptych.engine.values.batch import ForwardBatch, ForwardMode

NUM_KEPT, NUM_TOKENS = 3, 7
CONFIG = tiny_config(
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    rope=Rope(1e4, 4, start=12),
    latent=Latent(8, 12, 8, 4, 8, interleaved=True, norm_eps=1e-6),
    indexer=Indexer(2, 8, NUM_KEPT, interleaved=False, layers=(0,)),
)
PAGES = [5, 2]  # of 4 tokens


def attended(attention: AttentionBackend, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Run the tokens of one request; return their rotated queries, and what attention returns."""
    states = torch.randn(NUM_TOKENS, CONFIG.states_size, generator=torch.Generator().manual_seed(layer))
    qkv, out = torch.cat([states, index], dim=1), torch.zeros(NUM_TOKENS, CONFIG.num_heads * CONFIG.value_dim)
    attention.forward_extend(qkv, layer, out)
    return qkv[:, : CONFIG.num_heads * CONFIG.head_dim].view(NUM_TOKENS, 2, -1), out.view(NUM_TOKENS, 2, -1)


def new_pool() -> tuple[Tensor, Tensor]:
    """Return latents and index keys of the layers, of pages that nobody wrote."""
    kv, index_keys = (torch.full((6, layers, 1, 4, 1, dim), torch.nan) for layers, dim in ((2, 16), (1, 8)))
    return kv, index_keys


def batch() -> ForwardBatch:
    positions = np.arange(NUM_TOKENS)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=positions,
        positions=positions,
        out_slots=np.array(PAGES)[positions // 4] * 4 + positions % 4,
        page_table=np.array([PAGES], np.int32),
        seq_lens=np.array([NUM_TOKENS]),
        extend_lens=np.array([NUM_TOKENS]),
        num_sampled=np.ones(1, np.int64),
    )


def test_of_tokens_with_equal_scores_the_first_are_attended_to_also_by_a_layer_that_does_not_choose() -> None:
    assert CONFIG.indexer is not None
    kv, index_keys = new_pool()
    attention = SparseAttention(CONFIG, kv, index_keys, torch.float32)
    attention.init_forward_metadata(stage(batch(), torch.device("cpu")))
    for layer in range(CONFIG.num_layers):
        queries, out = attended(attention, layer, torch.zeros(NUM_TOKENS, CONFIG.indexer.size))
        kept = kv[PAGES, layer, 0, :, 0].flatten(0, 1)
        for token in range(NUM_TOKENS):
            seen = kept[: min(token + 1, NUM_KEPT)]
            expected = (queries[token] @ seen.T * CONFIG.score_scale).softmax(-1) @ seen[:, : CONFIG.value_dim]
            torch.testing.assert_close(out[token], expected)
    assert index_keys[PAGES, 0, 0, :, 0].flatten(0, 1)[:NUM_TOKENS].eq(0).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_c_kernels_attend_to_what_the_reference_attends_to_and_store_the_same(seed: int | None) -> None:
    """`seed` None: an indexer can't tell tokens apart."""
    assert CONFIG.indexer is not None
    index = torch.zeros(NUM_TOKENS, CONFIG.indexer.size)
    if seed is not None:
        index = torch.randn(index.shape, generator=torch.Generator().manual_seed(seed))
    pools, found = [new_pool() for _ in range(2)], []
    backends = SparseAttention(CONFIG, *pools[0], torch.float32), CpuSparseAttention(CONFIG, *pools[1])
    for attention in backends:
        attention.init_forward_metadata(stage(batch(), torch.device("cpu")))
        found.append(torch.stack([attended(attention, layer, index)[1] for layer in range(CONFIG.num_layers)]))
    torch.testing.assert_close(found[1], found[0])
    for ours, theirs in zip(pools[1], pools[0], strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_fp8_latents_are_read_with_the_scale_of_the_layer_that_keeps_them() -> None:
    scales = ((2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (5.0, 1.0))
    config = replace(CONFIG, num_layers=4, sources=(0, 0, 2, 2), kv_scales=scales)
    assert kv_scales(config, torch.float8_e4m3fn) == [scales[0], scales[0], scales[2], scales[2]]


def borrowing_pool() -> tuple[Tensor, Tensor]:
    """Return latents of one layer, and index keys of two."""
    kv, index_keys = (torch.full((6, layers, 1, 4, 1, dim), torch.nan) for layers, dim in ((1, 16), (2, 8)))
    return kv, index_keys


def test_a_layer_that_borrows_chooses_by_index_keys_of_its_own_and_reads_nothing_in_place_of_a_latent() -> None:
    indexer = Indexer(2, 8, NUM_KEPT, interleaved=False, layers=(0, 1))
    config = replace(CONFIG, sources=(0, 0), indexer=indexer, still_layers=frozenset({1}))
    qkv = torch.randn(2, NUM_TOKENS, config.qkv_size, generator=torch.Generator().manual_seed(0))
    qkv[1, :, config.num_heads * config.head_dim : config.states_size] = torch.nan
    pools, found = [borrowing_pool() for _ in range(2)], []
    for attention in (SparseAttention(config, *pools[0], torch.float32), CpuSparseAttention(config, *pools[1])):
        out = torch.zeros(2, NUM_TOKENS, config.num_heads * config.value_dim)
        attention.init_forward_metadata(stage(batch(), torch.device("cpu")))
        for layer in range(2):
            attention.forward_extend(qkv[layer].clone(), layer, out[layer])
        found.append(out)
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0])
