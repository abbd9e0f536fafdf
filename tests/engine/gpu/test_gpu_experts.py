"""Which experts GPUs keep in few bits, and what their layer computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.architectures.placement import Split
from diptych.architectures.size import LINEAR
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.arithmetic.ops import Ops, TorchOps
from diptych.engine.models.matrices.matrix import Weight
from diptych.kernels.quantized import QuantizedArray

HIDDEN, FFN = 128, 256


def fp8(n: int, k: int, seed: int) -> QuantizedArray:
    codes = np.random.default_rng(seed).integers(0, 0x78, (n, k), np.uint8)
    return QuantizedArray("fp8", codes, np.full((n, 1), 1e-3, np.float32))


def int4(n: int, k: int, seed: int) -> QuantizedArray:
    codes = np.random.default_rng(seed).integers(-8, 8, (n, k), np.int8)
    return QuantizedArray("int4", codes, np.full((n, k // 64), 0.01, np.float16), None, 64)


def forward(ops: Ops, weights: list[tuple[Weight, Weight]], x: Tensor) -> Tensor:
    """Return what a layer of these gates and ups, and downs, makes of tokens that never choose the last expert."""
    chosen = torch.tensor([[0, 1], [2, 1], [1, 0]], device=x.device)
    shares, out = torch.full(chosen.shape, 0.5, device=x.device), torch.full_like(x, torch.nan)
    gate_up, down = (
        [ops.matrix(f"0.experts.{i}.{name}", each, Split.ROWS) for i, each in enumerate(column)]
        for name, column in zip(("gate_up", "down"), zip(*weights, strict=True), strict=True)
    )
    ops.experts(gate_up, down, (2 * FFN, FFN), ops.silu_and_mul).forward(x, chosen, shares, out)
    return out


@pytest.mark.parametrize(("kinds", "error"), [((int4,) * 4, 1e-4), ((fp8,) * 4, 0.06), ((int4, fp8, int4, int4), 1e-4)])
def test_a_layer_computes_what_expanded_weights_would(
    kinds: tuple[type, ...], error: float, device: torch.device
) -> None:
    """One whose experts have different formats does expand them."""
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps

    weights: list[tuple[Weight, Weight]] = [
        (QuantizedWeight((kind(2 * FFN, HIDDEN, i),)), QuantizedWeight((kind(HIDDEN, FFN, 9 + i),)))
        for i, kind in enumerate(kinds)
    ]
    x = torch.randn(3, HIDDEN, device=device)
    found, expected = (
        forward(ops, weights, x) for ops in (GpuOps(torch.float32, device), TorchOps(torch.float32, device))
    )
    assert (found - expected).norm() <= error * expected.norm()


def test_weights_are_made_fp8_where_that_is_asked_for(device: torch.device) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuMatrix, GpuOps
    from diptych.engine.models.matrices.gpu_experts import FORMATS, PackedMatrix

    weight, ops = torch.randn(16, FFN, device=device), GpuOps(torch.float32, device, LINEAR)
    made = ops.matrix("0.experts.11.down", weight, Split.COLUMNS)
    assert isinstance(made, PackedMatrix)
    assert made.form == FORMATS["fp8"]
    assert (made.dense() - weight).norm() <= 0.04 * weight.norm()
    assert isinstance(ops.matrix("0.experts.11.down", weight[:, :24].contiguous(), Split.COLUMNS), GpuMatrix)


def test_parts_of_ranks_are_kept_where_blocks_begin_with_them(device: torch.device) -> None:
    from diptych.engine.models.matrices.gpu_experts import packed

    codes = np.random.default_rng(0).integers(0, 0x78, (384, 256), np.uint8)
    scales = np.random.default_rng(1).uniform(0.001, 0.01, (3, 2)).astype(np.float32).repeat(128, axis=0)
    whole = QuantizedArray("fp8", codes, scales, None, 128)
    kept = (
        whole.columns(128, 256),
        whole.rows(slice(128, 384)),
        whole.rows(slice(0, 200)),
        int4(6, 256, 0).columns(64, 192),
    )
    for part in kept:
        found = packed(QuantizedWeight((part,)), torch.float32, device)
        assert found is not None
        torch.testing.assert_close(found.dense().cpu(), torch.from_numpy(part.dequantize()), rtol=1e-6, atol=1e-7)
    assert packed(QuantizedWeight((whole.rows(slice(64, 256)),)), torch.float32, device) is None
