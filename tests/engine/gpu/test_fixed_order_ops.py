"""Products in a fixed order are those of the reference, and a token's do not depend on the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import on_gpu

from diptych.architectures.placement import Split
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.arithmetic.ops import Ops, TorchOps, activate_of
from diptych.engine.models.layers.attention import QkNorms, SharedNorms, WholeNorms
from diptych.kernels.quantized import QuantizedArray

NUM_EXPERTS, HIDDEN, FFN = 3, 64, 48


def ops_of(device: torch.device, dtype: torch.dtype) -> Ops:
    from diptych.engine.models.arithmetic.fixed_order_ops import FixedOrderOps

    return FixedOrderOps(dtype, device)


def test_gated_products_and_what_is_stored_in_few_bits_are_as_in_the_reference(device: torch.device) -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (2 * FFN, HIDDEN)).astype(np.int8)
    scales = np.full((2 * FFN, 1), 0.01, np.float32)
    stored = QuantizedWeight((QuantizedArray("int4", codes, scales, group=64),))
    x, results = torch.randn(70, HIDDEN, device=device), []
    for ops in (ops_of(device, torch.float32), TorchOps(torch.float32, device)):
        out = x.new_empty(70, FFN)
        gated = ops.gated(ops.matrix("0.gate_up", stored, Split.NONE), "silu")
        gated.forward(x, x.new_empty(70, 2 * FFN), out)
        results.append(out)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def experts_output(ops: Ops, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)

    def matrices(num_rows: int, num_columns: int, part: str) -> list[object]:
        weights = [torch.randn(num_rows, num_columns, generator=random).to(x) / 8 for _ in range(NUM_EXPERTS)]
        return [ops.matrix(f"0.experts.{i}.{part}", weight, Split.NONE) for i, weight in enumerate(weights)]

    gate_up, down = matrices(2 * FFN, HIDDEN, "gate_up"), matrices(HIDDEN, FFN, "down")
    out = torch.full_like(x, torch.nan)
    shares = torch.full(chosen.shape, 0.5, device=x.device, dtype=x.dtype)
    experts = ops.experts(gate_up, down, (2 * FFN, FFN), activate_of(ops, "silu"))  # type: ignore[arg-type]
    experts.forward(x, chosen, shares, out)
    return out


def chosen_by(num_tokens: int, device: torch.device) -> torch.Tensor:
    return torch.stack([torch.arange(num_tokens) % 3, (torch.arange(num_tokens) + 1) % 3], dim=1).to(device)


def test_experts_are_as_in_the_reference(device: torch.device) -> None:
    x, chosen = torch.randn(9, HIDDEN, device=device), chosen_by(9, device)
    fixed, reference = ops_of(device, torch.float32), TorchOps(torch.float32, device)
    torch.testing.assert_close(
        experts_output(fixed, x, chosen), experts_output(reference, x, chosen), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("num_tokens", [on_gpu(1), on_gpu(50), on_gpu(400)])
def test_an_experts_token_has_the_same_bits_beside_any_others(num_tokens: int, device: torch.device) -> None:
    x, chosen = torch.randn(600, HIDDEN, device=device, dtype=torch.bfloat16), chosen_by(600, device)
    ops = ops_of(device, torch.bfloat16)
    few = experts_output(ops, x[:num_tokens].contiguous(), chosen[:num_tokens].contiguous())
    assert torch.equal(few, experts_output(ops, x, chosen)[:num_tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_are_normed_as_one_have_the_same_bits_beside_any_others(
    dtype: torch.dtype, device: torch.device
) -> None:
    queries, keys, values = 4 * 24, 2 * 24, 2 * 24
    qkv = torch.randn(37, queries + keys + values, device=device).to(dtype)
    weights = torch.rand(queries, device=device).to(dtype), torch.rand(keys, device=device).to(dtype)
    fixed, reference = ops_of(device, dtype), TorchOps(dtype, device)
    alone = torch.cat([normed(WholeNorms(fixed, *weights, 1e-5), row) for row in (qkv[:1], qkv[1:7], qkv[7:])])
    assert torch.equal(alone, normed(WholeNorms(fixed, *weights, 1e-5), qkv))
    assert torch.equal(alone[:, queries + keys :], qkv[:, queries + keys :])
    torch.testing.assert_close(alone, normed(SharedNorms(reference, *weights, 1e-5), qkv))


def normed(norms: QkNorms, qkv: torch.Tensor) -> torch.Tensor:
    copy = qkv.clone()
    norms.apply(copy)
    return copy
