from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tiny_config import tiny_config

from diptych.architectures.config import Latent, Moe, Rope
from diptych.engine.values.prompt_cost import MIN_CHUNK, PromptCost, prompt_cost

LLAMA_8B = tiny_config(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    rope=Rope(5e5, 128),
    context_len=131072,
    tie_embeddings=False,
)


def chunk_lens(cost: PromptCost, prompt_len: int, budget: int) -> list[int]:
    lens: list[int] = []
    while sum(lens) < prompt_len:
        lens.append(min(prompt_len - sum(lens), cost.chunk_len(sum(lens), budget)))
    return lens


def test_chunks_become_shorter_so_that_every_step_costs_the_same() -> None:
    cost, start = PromptCost(1000.0), 0
    lens = chunk_lens(cost, 20_000, 512)
    assert (lens[0], lens[-2]) == (512, 24)
    for num_tokens in lens:
        assert cost.of(start, num_tokens) <= 512
        start += num_tokens


def test_a_chunk_has_at_least_some_tokens_but_no_more_than_the_budget() -> None:
    cost = PromptCost(1.0)
    assert [cost.chunk_len(100_000, budget) for budget in (512, MIN_CHUNK, 3)] == [MIN_CHUNK, MIN_CHUNK, 3]


def test_without_attention_over_all_of_it_a_token_costs_the_same_everywhere() -> None:
    assert chunk_lens(PromptCost(), 1200, 512) == [512, 512, 176]
    assert PromptCost().of(10**6, 7) == 7


def test_an_8b_model_at_128k_pays_six_times() -> None:
    cost = prompt_cost(LLAMA_8B)
    assert cost.even_len == pytest.approx(26624)
    assert cost.chunk_len(131_072, 8192) == 1383


def test_experts_that_a_token_passes_count_and_layers_with_a_window_do_not_grow() -> None:
    windows = replace(LLAMA_8B, windows=(512, 0) * 16)
    assert prompt_cost(windows).even_len == pytest.approx(2 * 26624)
    assert prompt_cost(replace(LLAMA_8B, windows=(512,) * 32)).even_len == math.inf
    moe = Moe(num_experts=64, experts_per_token=2, ffn_size=7168, normalize=True)
    assert prompt_cost(replace(LLAMA_8B, moe=moe)).even_len == pytest.approx(26624)
    shared = replace(moe, experts_per_token=1, shared_ffn_size=7168)
    assert prompt_cost(replace(LLAMA_8B, moe=shared)).even_len == pytest.approx(26624)


def test_a_latent_is_as_wide_as_attention_computes_with_it_and_its_projections_are_those_of_the_checkpoint() -> None:
    """DeepSeek V3 without experts: 128 heads look at 576 dimensions of a key, and add 512 of a value."""
    latent = Latent(1536, 512, 128, 64, 128, interleaved=True, norm_eps=1e-6)
    shape: Any = {"hidden_size": 7168, "num_layers": 61, "num_heads": 128, "num_kv_heads": 1, "head_dim": 576}
    config = replace(LLAMA_8B, **shape, ffn_size=18432, rope=Rope(1e4, 64, start=512), latent=latent)
    projections = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert prompt_cost(config).even_len == pytest.approx((projections + 3 * 7168 * 18432) / (128 * (576 + 512)))
