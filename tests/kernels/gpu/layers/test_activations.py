from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.engine.models.arithmetic.ops import TorchOps
from diptych.kernels.gpu.layers.activations import clamped_swiglu, gelu_tanh_and_mul, mul_sigmoid, silu_and_mul

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter's NumPy

TOLERANCES = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # two of a narrow type's last bit
ACTIVATIONS = [
    (silu_and_mul, TorchOps.silu_and_mul),
    (gelu_tanh_and_mul, TorchOps.gelu_tanh_and_mul),
    (partial(clamped_swiglu, alpha=1.702, limit=3.0), partial(TorchOps.clamped_swiglu, alpha=1.702, limit=3.0)),
]
Activate = Callable[[Tensor, Tensor], None]
Reference = Callable[[TorchOps, Tensor, Tensor], None]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("activate", "reference"), ACTIVATIONS)
@pytest.mark.parametrize(("count", "size"), [(0, 96), (1, 96), (3, 1536), on_gpu(1, 14_336), on_gpu(4099, 14_336)])
def test_gates_are_activated_and_rounded_as_torch_does_it(
    count: int, size: int, activate: Activate, reference: Reference, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = (torch.randn(count, 2 * size, device=device) * 3).to(dtype)
    out = torch.full((count, size), torch.nan, dtype=dtype, device=device)
    expected = torch.empty_like(out)
    activate(gate_up, out)
    reference(TorchOps(dtype), gate_up, expected)
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=2e-6)
    assert (
        dtype == torch.float32 or not count or (out == expected).double().mean() > 0.9
    )  # torch's 1 + tanh is not exact


@pytest.mark.parametrize(("activate", "reference"), ACTIVATIONS)
def test_far_from_zero_a_gate_is_open_or_shut(activate: Activate, reference: Reference, device: torch.device) -> None:
    gates = torch.tensor([[-3e4, -200.0, -89.0, -20.0, -0.0, 0.0, 20.0, 89.0, 200.0, 3e4]], device=device)
    gate_up, out = torch.cat((gates, torch.ones_like(gates)), dim=1), torch.full_like(gates, torch.nan)
    expected = torch.empty_like(out)
    activate(gate_up, out)
    reference(TorchOps(gates.dtype), gate_up, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "size"), [(0, 96), (1, 96), (3, 1000), on_gpu(4099, 4096)])
def test_numbers_are_multiplied_by_the_sigmoids_of_their_gates_as_torch_does_it(
    count: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, gates = ((3 * torch.randn(count, size, device=device)).to(dtype) for _ in range(2))
    gates.view(-1)[:3] = torch.tensor([-200.0, 0.0, 200.0])[: gates.numel()]
    expected = x.clone()
    mul_sigmoid(x, gates)
    TorchOps(dtype).mul_sigmoid(expected, gates)
    torch.testing.assert_close(x, expected, rtol=TOLERANCES[dtype], atol=2e-6)
