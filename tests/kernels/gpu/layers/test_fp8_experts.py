"""Experts in FP8, against the products of what codes stand for, of weights and of states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import on_gpu

from diptych.kernels.gpu.layers.fp8_experts import (
    FP8_BLOCKS,
    Fp8Experts,
    choose_block,
    grouped_fp8,
    reference_grouped_fp8,
)
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.fp8_rows import quantize_rows
from diptych.kernels.gpu.layers.moe import align_experts
from diptych.kernels.quantized import QuantizedArray

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
IMPRECISE = 8e-3  # tensor cores keep 14 bits of sums of FP8 products, until 128 columns are added up in float32
FAST = 3e-2  # or all columns
DISTINCT = 5


def random_array(n: int, k: int, *, is_blocked: bool, seed: int = 0) -> QuantizedArray:
    """Return a weight with a scale a block of 128 x 128, or a row."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 0x77, (n, k), np.uint8) | random.integers(0, 2, (n, k), np.uint8) << 7
    if not is_blocked:
        return QuantizedArray("fp8", codes, random.uniform(0.001, 0.01, (n, 1)).astype(np.float32))
    scales = random.uniform(0.001, 0.01, (-(-n // 128), -(-k // 128))).astype(np.float32)
    return QuantizedArray("fp8", codes, np.repeat(scales, 128, axis=0)[:n], None, 128)


def experts_on(
    device: torch.device, num_experts: int, n: int, k: int, *, is_blocked: bool
) -> tuple[Fp8Experts, list[Fp8Matrix]]:
    """Return experts that are alike where they are many: `DISTINCT` of them are made, and take turns."""
    count = min(num_experts, DISTINCT)
    made = [Fp8Matrix.of(random_array(n, k, is_blocked=is_blocked, seed=seed), device) for seed in range(count)]
    matrices = [made[expert % count] for expert in range(num_experts)]
    return Fp8Experts.of(matrices), matrices


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        (16, torch.float32),
        (128, torch.float16),
        *(on_gpu(block, torch.bfloat16) for block in FP8_BLOCKS),
    ],
)
@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "choices", "n", "k"),
    [
        (1, 4, 2, 144, 304),
        (9, 5, 3, 300, 128),
        (6, 3, 1, 40, 144),
        on_gpu(1, 128, 8, 3072, 4096),
        on_gpu(64, 128, 8, 4096, 1536),
    ],
)
def test_each_assignment_is_multiplied_by_its_expert(
    num_tokens: int,
    num_experts: int,
    choices: int,
    n: int,
    k: int,
    is_blocked: bool,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A row of each token with a bias, as gates and ups, and one of each assignment without, as downs."""
    weights, matrices = experts_on(device, num_experts, n, k, is_blocked=is_blocked)
    chosen = torch.rand(num_tokens, num_experts, device=device).topk(choices).indices
    bias = torch.randn(num_experts, n, device=device).to(dtype)
    aligned = align_experts(chosen, num_experts, block)
    for num_rows, added in ((num_tokens, bias), (chosen.numel(), None)):
        x = torch.randn(num_rows, k, device=device).to(dtype)
        out = torch.full((chosen.numel(), n), torch.nan, dtype=dtype, device=device)
        weights.multiply(x, aligned, chosen, out, added)
        expected = reference_grouped_fp8(x, matrices, chosen)
        if added is not None:
            expected += added[chosen.flatten()].double()
        of_sums = 0.0 if device.type == "cpu" else FAST if block == 128 and not is_blocked else IMPRECISE
        bound = max(TOLERANCES[dtype], of_sums)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound * float(expected.std()))


def test_blocks_are_large_only_where_the_last_of_an_expert_is_one_of_many() -> None:
    averages = (1, 8, 9, 16, 17, 255, 256, 1 << 12)
    assert [choose_block(128 * average, 128, 0) for average in averages] == [16, 16, 32, 32, 64, 64, 128, 128]
    assert [choose_block(128 * average, 128, 128) for average in averages] == [16, 16, 32, 32, 64, 64, 64, 64]
    assert choose_block(1, 128, 0) == FP8_BLOCKS[0]


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("block", [on_gpu(block) for block in FP8_BLOCKS])  # NumPy's products do depend on the place
def test_a_token_comes_out_the_same_bit_for_bit_beside_any_others(
    block: int, is_blocked: bool, device: torch.device
) -> None:
    weights, _ = experts_on(device, 4, 144, 304, is_blocked=is_blocked)
    chosen, x = torch.rand(20, 4, device=device).topk(2).indices, torch.randn(20, 304, device=device).half()
    outs = []
    for some in (slice(0, 20), slice(13, 16)):
        out = torch.full((chosen[some].numel(), 144), torch.nan, dtype=x.dtype, device=device)
        rows, aligned = (
            quantize_rows(x[some], 128 if is_blocked else 0),
            align_experts(chosen[some].contiguous(), 4, block),
        )
        grouped_fp8(rows, weights, aligned, out)
        outs.append(out)
    assert torch.equal(outs[0][26:32], outs[1])
