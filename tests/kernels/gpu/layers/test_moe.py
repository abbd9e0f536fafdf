from __future__ import annotations

import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.kernels.gpu.layers.moe import (
    BLOCKS,
    ExpertWeights,
    align_experts,
    choose_block,
    combine_experts,
    grouped_gemm,
    reference_combine,
    reference_grouped_gemm,
    roomy_block,
)

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
MIXTURES = [  # tokens, experts, experts a token
    (1, 8, 2),
    (9, 5, 3),
    (40, 4, 1),
    on_gpu(1, 128, 8),
    on_gpu(64, 128, 8),
    on_gpu(4099, 8, 2),
]


def choose(num_tokens: int, num_experts: int, choices: int, device: torch.device) -> Tensor:
    """Return different experts for each token, `[num_tokens, choices]`, some of them by far the most popular."""
    scores = torch.rand(num_tokens, num_experts, device=device) + torch.linspace(0, 1, num_experts, device=device)
    return scores.topk(choices).indices


def assert_close(value: Tensor, expected: Tensor, terms: int) -> None:
    """Sums of so many products of about 1 are rounded to float32 at each addition; half of those are off by 2^-25."""
    bound = TOLERANCES[value.dtype]
    torch.testing.assert_close(value.double(), expected, rtol=bound, atol=bound * terms**0.5 + 2**-21 * terms)


@pytest.mark.parametrize("num_tokens", [9, on_gpu(4099)])
def test_what_nobodys_experts_were_chosen_for_adds_nothing(num_tokens: int, device: torch.device) -> None:
    """A rank with experts 2, 3 and 4 of 8."""
    chosen = choose(num_tokens, 8, 3, device)
    is_ours = (chosen >= 2) & (chosen < 5)
    own = torch.where(is_ours, chosen - 2, 3)
    aligned = align_experts(own, 3, 16)
    counted = [int((own == expert).sum()) for expert in range(3)]
    assert (aligned.experts >= 0).sum() == sum(-(-count // 16) for count in counted)
    results = torch.randn(chosen.numel(), 40, device=device)
    results[~is_ours.flatten()] = torch.nan  # nobody wrote them
    shares = torch.rand(num_tokens, 3, device=device).where(is_ours, 0)
    out = torch.empty(num_tokens, 40, device=device)
    combine_experts(results, own, shares, out)
    assert_close(out, reference_combine(results.nan_to_num(), shares), 1)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_tokens", "num_experts", "choices"), [*MIXTURES, (600, 3, 2)])
def test_blocks_hold_the_assignments_of_one_expert_each_in_order(
    num_tokens: int, num_experts: int, choices: int, dtype: torch.dtype, block: int, device: torch.device
) -> None:
    chosen = choose(num_tokens, num_experts, choices, device).to(dtype)
    aligned = align_experts(chosen, num_experts, block)
    assert aligned.block == block
    flat, expected, experts = chosen.flatten().cpu(), [], []
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten()
        for some in (mine[start : start + block] for start in range(0, len(mine), block)):
            expected.append([*some.tolist(), *[len(flat)] * (block - len(some))])
            experts.append(expert)
    assert aligned.experts.tolist() == experts + [-1] * (len(aligned.experts) - len(experts))
    assert aligned.assignments[: len(experts)].tolist() == expected


@pytest.mark.parametrize("num_experts", [1, 8])
def test_there_is_room_for_the_worst_choice(num_experts: int, device: torch.device) -> None:
    for size in (1, 17, 33):
        spread = torch.arange(size, device=device)[:, None] % num_experts
        for chosen in (spread, torch.zeros_like(spread), torch.full_like(spread, num_experts - 1)):
            aligned = align_experts(chosen, num_experts, 16)
            rows = aligned.assignments[aligned.experts >= 0]
            assert sorted(rows[rows < size].tolist()) == list(range(size))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [BLOCKS[0], on_gpu(32), on_gpu(64), BLOCKS[-1]])
@pytest.mark.parametrize(("num_tokens", "num_experts", "choices"), MIXTURES)
@pytest.mark.parametrize(("n", "k"), [(40, 144), on_gpu(1536, 2048)])
def test_each_assignment_is_multiplied_by_its_expert(
    num_tokens: int,
    num_experts: int,
    choices: int,
    n: int,
    k: int,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    chosen = choose(num_tokens, num_experts, choices, device)
    weights = ExpertWeights.of([torch.randn(n, k, device=device).to(dtype) for _ in range(num_experts)])
    aligned = align_experts(chosen, num_experts, block)
    for num_rows in {num_tokens, chosen.numel()}:
        x = torch.randn(num_rows, k, device=device).to(dtype)
        out = torch.full((chosen.numel(), n), torch.nan, dtype=dtype, device=device)
        grouped_gemm(x, weights, aligned, out)
        repeated, flat = x.repeat_interleave(chosen.numel() // num_rows, dim=0), chosen.flatten()
        some = torch.randperm(len(flat), device=device)[:200]
        assert_close(out[some], reference_grouped_gemm(repeated[some], weights, flat[some]), k)
        assert not out.isnan().any()


@pytest.mark.parametrize("block", [on_gpu(block) for block in BLOCKS])  # NumPy's products do depend on the place
def test_a_token_comes_out_the_same_bit_for_bit_beside_any_others(block: int, device: torch.device) -> None:
    chosen = choose(20, 4, 2, device)
    weights = ExpertWeights.of([torch.randn(24, 96, device=device).half() for _ in range(4)])
    x = torch.randn(20, 96, device=device).half()
    outs = []
    for some in (slice(0, 20), slice(13, 16)):
        out = torch.full((chosen[some].numel(), 24), torch.nan, dtype=x.dtype, device=device)
        grouped_gemm(x[some], weights, align_experts(chosen[some].contiguous(), 4, block), out)
        outs.append(out)
    assert torch.equal(outs[0][26:32], outs[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_tokens", "size", "choices"), [(1, 64, 1), (3, 1100, 3), on_gpu(4099, 4096, 8)])
def test_results_are_added_up_by_their_shares(
    num_tokens: int, size: int, choices: int, dtype: torch.dtype, device: torch.device
) -> None:
    chosen = choose(num_tokens, 16, choices, device)
    results = torch.randn(num_tokens * choices, size, device=device).to(dtype)
    shares = torch.rand(num_tokens, choices, device=device).to(dtype)
    out = torch.full((num_tokens, size), torch.nan, dtype=dtype, device=device)
    combine_experts(results, chosen, shares, out)
    assert_close(out, reference_combine(results, shares), 1)


def test_the_order_in_which_experts_were_chosen_changes_no_bit(device: torch.device) -> None:
    chosen, shares = choose(5, 16, 4, device), torch.rand(5, 4, device=device)
    results = torch.randn(5, 4, 300, device=device) * 10 ** torch.linspace(-3, 3, 4, device=device)[None, :, None]
    outs = []
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1])):
        out = torch.empty(5, 300, device=device)
        combine_experts(
            results[:, order].reshape(20, 300), chosen[:, order].contiguous(), shares[:, order].contiguous(), out
        )
        outs.append(out)
    assert torch.equal(outs[0], outs[1])


def test_blocks_grow_with_what_an_expert_has_to_do() -> None:
    assert [choose_block(count, 8) for count in (1, 128, 200, 512, 100_000)] == [16, 16, 32, 64, 128]


@pytest.mark.parametrize(("average", "block"), [(4, 8), (8, 16), (16, 32), (32, 64), (64, 64), (65, 128), (128, 128)])
def test_blocks_have_room_for_twice_what_an_expert_gets_unless_it_is_much(average: int, block: int) -> None:
    assert roomy_block(128 * average, 128, 8, 128) == block
    assert roomy_block(128 * average + 127, 128, 8, 128) == block


def test_roomy_blocks_have_a_smallest_and_a_largest_size() -> None:
    assert [roomy_block(1, 128, smallest, 128) for smallest in (8, 16)] == [8, 16]
    assert [roomy_block(1 << 20, 128, 8, largest) for largest in (64, 128)] == [64, 128]
