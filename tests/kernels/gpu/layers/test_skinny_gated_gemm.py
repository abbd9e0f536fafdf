from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import NARROW, on_gpu
from torch import Tensor

from diptych.kernels.gpu.layers.activations import Activation
from diptych.kernels.gpu.layers.skinny_gated_gemm import choose_tile, pays_up_to, skinny_gated_gemm
from diptych.kernels.gpu.layers.skinny_gemm import MAX_ROWS

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of what is rounded three times
ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh"]


def inputs(m: int, ffn_size: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a weight, and a result that says where nothing was written."""
    x, weight = torch.randn(m, k, device=device).to(dtype), torch.randn(2 * ffn_size, k, device=device)
    out = torch.full((m, ffn_size), torch.nan, dtype=dtype, device=device)
    return x, (weight / k**0.5).to(dtype), out


def assert_gated(x: Tensor, weight: Tensor, out: Tensor, activation: Activation) -> None:
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    bound = TOLERANCES[x.dtype]
    torch.testing.assert_close(out.double(), activated * up, rtol=bound, atol=bound)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("m", "ffn_size", "k"), [(1, 96, 512), (16, 64, 272), (5, 32, 64)])
def test_it_is_the_gated_product_in_higher_precision(
    m: int, ffn_size: int, k: int, dtype: torch.dtype, activation: Activation, device: torch.device
) -> None:
    x, weight, out = inputs(m, ffn_size, k, dtype, device)
    skinny_gated_gemm(x, weight, out, activation)
    assert_gated(x, weight, out, activation)


@pytest.mark.parametrize("m", [on_gpu(m) for m in (1, 3, 8, 16)])
@pytest.mark.parametrize(("ffn_size", "k"), [(14_336, 4096), (8192, 3072), (11_008, 4096), (4864, 896), (7168, 8192)])
def test_it_is_the_gated_product_for_the_shapes_of_models(m: int, ffn_size: int, k: int, device: torch.device) -> None:
    x, weight, out = inputs(m, ffn_size, k, torch.bfloat16, device)
    skinny_gated_gemm(x, weight, out, "silu")
    assert_gated(x, weight, out, "silu")


@pytest.mark.parametrize(("ffn_size", "k"), [on_gpu(64, 528), on_gpu(14_336, 4096)])
def test_a_row_comes_out_the_same_bit_for_bit_beside_any_others_and_every_time(
    ffn_size: int, k: int, device: torch.device
) -> None:
    x, weight, out = inputs(MAX_ROWS, ffn_size, k, torch.float16, device)
    skinny_gated_gemm(x, weight, out, "silu")
    for m in (1, 5, MAX_ROWS):
        fewer = torch.full_like(out[-m:], torch.nan)
        skinny_gated_gemm(x[-m:], weight, fewer, "silu")
        assert torch.equal(fewer, out[-m:])


@pytest.mark.parametrize(("m", "ffn_size"), [(17, 32), (1, 33)])
def test_more_than_sixteen_rows_and_parts_of_tiles_are_refused(m: int, ffn_size: int, device: torch.device) -> None:
    x, weight, out = inputs(m, ffn_size, 64, torch.float16, device)
    with pytest.raises(AssertionError):
        skinny_gated_gemm(x, weight, out, "silu")


@pytest.mark.parametrize(("ffn_size", "block_n"), [(14_336, 128), (7680, 128), (7168, 64), (576, 64)])
def test_programs_have_as_many_gates_as_leave_enough_of_them(ffn_size: int, block_n: int) -> None:
    assert choose_tile(ffn_size).block_n == block_n


def test_it_pays_where_all_programs_run_at_once_and_are_enough() -> None:
    sizes = [14_336, 11_008, 8192, 7168, 4864]
    assert [pays_up_to(size, 4096) for size in sizes] == [MAX_ROWS] * len(sizes)
    assert [pays_up_to(*shape) for shape in ((18_944, 3584), (1536, 576), (14_336, 4100), (8200, 4096))] == [0] * 4
