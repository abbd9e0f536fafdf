"""The arithmetic of a layer by kernels of GPUs is that of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.architectures.config import Activation, ClampedSwiglu
from diptych.architectures.placement import Split
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.lora.registry import Adapter, InvalidAdapter, Product
from diptych.engine.models.adapters.lora import Loras, LowRankSetting
from diptych.engine.models.arithmetic.ops import Ops, TorchOps
from diptych.kernels.adapted_matrix import AdaptedMatrix
from diptych.kernels.quantized import QuantizedArray

EPS = 1e-5
NO_SLOT = -1  # of a request without an adapter


def both(dtype: torch.dtype, device: torch.device) -> tuple[Ops, Ops]:
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps

    return GpuOps(dtype, device), TorchOps(dtype, device)


def states(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_norms_and_activations_are_as_in_the_reference(num_rows: int, device: torch.device) -> None:
    x, delta, weight = (states(device, torch.float32, *shape) for shape in ((num_rows, 48), (num_rows, 48), (48,)))
    gate_up, qkv, head = (states(device, torch.float32, *shape) for shape in ((num_rows, 96), (num_rows, 96), (16,)))
    results = []
    for ops in both(torch.float32, device):
        normed, added, silu, gelu, clamped = (torch.empty_like(x) for _ in range(5))
        sum_of, heads = x.clone(), qkv.clone()
        ops.rms_norm(x, weight, EPS, normed)
        ops.add_rms_norm(sum_of, delta, weight, EPS, added)
        ops.silu_and_mul(gate_up, silu)
        ops.gelu_tanh_and_mul(gate_up, gelu)
        ops.clamped_swiglu(gate_up, clamped, alpha=1.702, limit=1.0)
        ops.norm_heads(heads, 2, head, head, EPS)
        results.append((normed, sum_of, added, silu, gelu, clamped, heads))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(3, 2048), (3, 20), (20, 2048)])
def test_products_of_few_and_of_many_rows_are_as_in_the_reference(
    num_tokens: int, num_rows: int, device: torch.device
) -> None:
    weight, x = states(device, torch.float16, num_rows, 64), states(device, torch.float16, num_tokens, 64)
    products, rows = [], []
    for ops in both(torch.float16, device):
        matrix, product = ops.matrix("0.o", weight, Split.NONE), x.new_empty(num_tokens, num_rows)
        matrix.multiply(x, product)
        products.append(product)
        rows.append(matrix.rows(torch.tensor([5, 0], device=device)))
    torch.testing.assert_close(*products, atol=2e-2, rtol=2e-3)
    assert torch.equal(*rows)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiglu(alpha=1.702, limit=1.0)])
@pytest.mark.parametrize(("num_tokens", "ffn_size"), [(3, 4096), (3, 48), (20, 4096)])
def test_gated_products_of_few_and_of_many_rows_are_as_in_the_reference(
    num_tokens: int, ffn_size: int, activation: Activation, device: torch.device
) -> None:
    weight, x = states(device, torch.float16, 2 * ffn_size, 64) / 8, states(device, torch.float16, num_tokens, 64)
    results = []
    for ops in both(torch.float16, device):
        gate_up, out = x.new_empty(num_tokens, 2 * ffn_size), x.new_full((num_tokens, ffn_size), torch.nan)
        ops.gated(ops.matrix("0.gate_up", weight, Split.NONE), activation).forward(x, gate_up, out)
        results.append(out)
    torch.testing.assert_close(*results, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("adapters", [None, [NO_SLOT, 0]])
def test_gates_and_ups_are_stored_before_they_are_activated_only_where_an_adapter_changes_them(
    adapters: list[int] | None, device: torch.device
) -> None:
    from diptych.kernels.gpu.layers.adapter_slots import AdapterSlots

    weight, x = states(device, torch.float16, 2 * 4096, 64) / 8, states(device, torch.float16, 2, 64)
    product = Product("0.gate_up", 0, np.full((1, 64), 0.1, np.float32), np.ones((4096, 1), np.float32))
    results, stored = [], x.new_empty(0)
    for ops in reversed(both(torch.float16, device)):
        matrices = {"0.gate_up": AdaptedMatrix(64, ((0, 4096), (4096, 4096)))}
        setting = LowRankSetting(1, 16, matrices, torch.float16, device)
        loras = Loras(0, setting, lambda of: AdapterSlots(1, of.max_rank, of.matrices, of.dtype, of.device))
        gated = ops.gated(loras.wrap("0.gate_up", ops.matrix("0.gate_up", weight, Split.NONE)), "silu")
        loras.install(0, loras.prepare(Adapter("0" * 32, (product,))))
        loras.begin(None if adapters is None else np.array(adapters), np.array([1, 1]), np.array([0, 1]))
        stored, out = x.new_full((2, 2 * 4096), torch.nan), x.new_empty(2, 4096)
        gated.forward(x, stored, out)
        results.append(out)
    torch.testing.assert_close(*results, atol=5e-3, rtol=5e-3)
    assert bool(stored.isnan().all()) == (adapters is None)


def test_an_adapter_of_a_rank_that_no_slot_has_room_for_is_refused(device: torch.device) -> None:
    from diptych.kernels.gpu.layers.adapter_slots import AdapterSlots

    setting = LowRankSetting(1, 20, {"0.o": AdaptedMatrix(8, ((0, 8),))}, torch.float16, device)
    loras = Loras(0, setting, lambda of: AdapterSlots(1, of.max_rank, of.matrices, of.dtype, of.device))
    sides = {rank: (np.ones((rank, 8), np.float32), np.ones((8, rank), np.float32)) for rank in (32, 33)}
    loras.prepare(Adapter("0" * 32, (Product("0.o", 0, *sides[32]),)))  # slots have ranks in sixteens
    with pytest.raises(InvalidAdapter, match=r"rank 33, more than the 32 .* --max-lora-rank 33"):
        loras.prepare(Adapter("0" * 32, (Product("0.o", 0, *sides[33]),)))


@pytest.mark.parametrize(("group", "is_kept"), [(0, True), (24, False)])
def test_what_is_stored_in_few_bits_is_kept_or_the_log_says_once_that_it_is_expanded(
    group: int, is_kept: bool, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuMatrix

    codes = np.arange(96, dtype=np.int8).reshape(2, 48)
    scales = np.full((2, 2 if group else 1), 0.5, np.float32)
    weight = QuantizedWeight((QuantizedArray("int8", codes, scales, None, group),))
    ours, _ = both(torch.float16, device)
    for name in ("0.o", "1.o"):
        matrix = ours.matrix(name, weight, Split.NONE)
        assert isinstance(matrix, GpuMatrix) != is_kept
        assert matrix.rows(torch.arange(2, device=device)).tolist() == (codes * 0.5).tolist()
    said = "weights in int8 are expanded to float16, no kernel keeps them: the first is 0.o, 192 bytes instead of 112"
    assert caplog.messages == ([] if is_kept else [said])
