from __future__ import annotations

import pytest
import torch
from gpu_cases import FLOATS, on_gpu

from diptych.engine.models.arithmetic.ops import ExpertsInTurn
from diptych.engine.models.matrices.gpu_experts import GroupedExperts
from diptych.engine.models.matrices.matrix import TorchMatrix
from diptych.kernels.gpu.layers.activations import silu_and_mul
from diptych.kernels.gpu.layers.moe import ExpertWeights

ERRORS = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}  # of all numbers together, rounded three times


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "choices", "hidden", "ffn"),
    [
        (0, 4, 2, 48, 32),
        (1, 4, 2, 48, 32),
        (37, 5, 3, 48, 32),
        on_gpu(1, 128, 8, 2048, 768),
        on_gpu(600, 8, 2, 4096, 1792),
    ],
)
def test_experts_all_at_once_are_the_experts_in_turn(
    num_tokens: int,
    num_experts: int,
    choices: int,
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device,
) -> None:
    """What comes in has the magnitude of what goes out, as in a model."""
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    scale = hidden**-0.5
    gate_up = [(torch.randn(2 * ffn, hidden, device=device) * scale).to(dtype) for _ in range(num_experts)]
    down = [(torch.randn(hidden, ffn, device=device) * scale).to(dtype) for _ in range(num_experts)]
    bias = torch.randn(num_experts, 2 * ffn, device=device).to(dtype) if has_bias else None
    shares, chosen = torch.rand(num_tokens, num_experts, device=device).softmax(dim=-1).topk(choices)
    out, expected = torch.full_like(x, torch.nan), torch.empty_like(x)
    grouped = GroupedExperts(ExpertWeights.of(gate_up), ExpertWeights.of(down), silu_and_mul, bias)
    grouped.forward(x, chosen, shares.to(dtype), out)
    in_turn = ExpertsInTurn([*map(TorchMatrix, gate_up)], [*map(TorchMatrix, down)], (2 * ffn, ffn), silu_and_mul, bias)
    in_turn.forward(x, chosen, shares.to(dtype), expected)
    error = (out.double() - expected.double()).norm()
    assert error <= ERRORS[dtype] * expected.double().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_captures_them_whatever_is_chosen_later() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(16, 256, device="cuda").half(), torch.empty(16, 256, device="cuda").half()
    gate_up = [(torch.randn(512, 256, device="cuda") / 16).half() for _ in range(8)]
    down = [(torch.randn(256, 256, device="cuda") / 16).half() for _ in range(8)]
    experts = GroupedExperts(ExpertWeights.of(gate_up), ExpertWeights.of(down), silu_and_mul)
    expected = torch.empty_like(out)
    chosen, shares = torch.rand(16, 8, device="cuda").topk(2).indices, torch.rand(16, 2, device="cuda").half()
    experts.forward(x, chosen, shares, out)  # compiled before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.forward(x, chosen, shares, out)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        chosen.copy_(torch.rand(16, 8, device="cuda").topk(2).indices)
        graph.replay()
        experts.forward(x, chosen, shares, expected)
        assert torch.equal(out, expected)
