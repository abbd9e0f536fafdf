"""Layers of steps with many new tokens give on Hopper what they give anywhere. On a Hopper GPU alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from tiny_config import tiny_config

from diptych.architectures.config import ModelConfig, Rope

HOPPER: Final = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

FP8: Final = torch.float8_e4m3fn
CONFIG: Final = tiny_config(num_heads=8, num_kv_heads=2, head_dim=128, rope=Rope(1e4, 128), context_len=4096)
EXTEND_LENS, SEQ_LENS = np.array([1500, 2, 700]), np.array([1500, 90, 3333])


def new_pool(config: ModelConfig, kv_dtype: torch.dtype) -> torch.Tensor:
    shape = (700, config.num_layers, 2, 16, config.num_kv_heads, config.head_dim)
    return torch.randn(shape, device="cuda").to(kv_dtype)


def attended(
    config: ModelConfig, kv: torch.Tensor, layer: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """With what the step has planned, and without."""
    from diptych.engine.attention.gpu_layers import gpu_layers
    from diptych.engine.attention.triton_kernels import Chunks, PairKernels, Requests

    torch.manual_seed(0)
    kernels, at = PairKernels(config, kv, dtype), gpu_layers(config, kv)[layer]
    table = torch.randperm(len(kv), device="cuda").int()[: 3 * 210].view(3, 210)
    starts = torch.from_numpy(np.cumsum([0, *EXTEND_LENS]).astype(np.int32)).cuda()
    requests = Requests(table, torch.from_numpy(SEQ_LENS.astype(np.int32)).cuda())
    queries = torch.randn(int(EXTEND_LENS.sum()), config.num_heads, config.head_dim, device="cuda").to(dtype)
    plan = kernels.plan(EXTEND_LENS, SEQ_LENS)
    assert (plan is None) == (dtype == torch.float32)
    chunks = Chunks(requests, starts, int(EXTEND_LENS.max()), prompts=plan)
    outs = torch.full_like(queries, torch.nan), torch.full_like(queries, torch.nan)
    for out, each in zip(outs, (chunks, replace(chunks, prompts=None)), strict=True):
        kernels.extend(at, queries, out, each)
    return outs


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_step_with_many_new_tokens_gives_the_same(kv_dtype: torch.dtype) -> None:
    scaled = replace(CONFIG, kv_scales=((0.5, 0.3),) * CONFIG.num_layers if kv_dtype == FP8 else ())
    ours, others = attended(scaled, new_pool(scaled, kv_dtype), 1, torch.bfloat16)
    torch.testing.assert_close(ours, others, atol=2e-3, rtol=2e-2)


def test_layers_with_a_window_and_states_of_32_bits_are_computed_as_before() -> None:
    windowed = replace(CONFIG, windows=(0, 100) * (CONFIG.num_layers // 2))
    for config, layer, kv_dtype, dtype in (
        (windowed, 1, torch.bfloat16, torch.bfloat16),
        (CONFIG, 0, FP8, torch.float32),
    ):
        ours, others = attended(config, new_pool(config, kv_dtype), layer, dtype)
        assert torch.equal(ours, others)


def test_small_steps_and_fp8_without_room_for_it_expanded_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.engine.attention import hopper_prompts
    from diptych.kernels.gpu.attention.prompt_attention import TILE

    monkeypatch.setattr(hopper_prompts, "EXPANDED_NBYTES", 38 * 2 * 2 * TILE.keys * 2 * 128)
    few = np.full(400, 3), np.full(400, 90)
    small, large = (np.array([40]), np.array([4000])), (EXTEND_LENS, SEQ_LENS)
    narrow, wide = (
        hopper_prompts.HopperPrompts.of(CONFIG, new_pool(CONFIG, dtype), torch.bfloat16)
        for dtype in (FP8, torch.bfloat16)
    )
    assert narrow is not None
    assert wide is not None
    found = [prompts.plan(*step) is None for prompts in (narrow, wide) for step in (small, few, large)]
    assert found == [True, True, True, True, True, False]
