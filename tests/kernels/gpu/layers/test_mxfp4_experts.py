"""Experts in MXFP4, against the numpy reference of quantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.architectures.config import ClampedSwiglu
from diptych.architectures.placement import Split
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.arithmetic.gpu_ops import GpuMatrix, GpuOps
from diptych.engine.models.arithmetic.ops import Ops, TorchOps, activate_of
from diptych.engine.models.matrices.gpu_experts import PackedMatrix
from diptych.kernels.gpu.layers.moe import BLOCKS, ExpertWeights, align_experts, reference_grouped_quantized
from diptych.kernels.gpu.layers.mxfp4_experts import (
    BIAS,
    MXFP4_BLOCKS,
    TILES,
    TILES_OF_FEW,
    TO_BFLOAT16,
    TO_FLOAT16,
    Mxfp4Experts,
    Mxfp4Matrix,
    can_keep,
    grouped_mxfp4,
    tile_of,
    unpack,
)
from diptych.kernels.quantized import FP4_VALUES, QuantizedArray, mxfp4_nbytes

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
CPU = torch.device("cpu")
DISTINCT = 5


def random_array(n: int, k: int, exponents: tuple[int, int] = (121, 126), seed: int = 0) -> QuantizedArray:
    """Return a weight of random codes, with scales of 2 to the power of some of `exponents` - 127."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (n, k), np.uint8)
    powers = random.integers(*exponents, (n, k // 32), endpoint=True) - 127
    return QuantizedArray("fp4", codes, np.ldexp(np.float32(1), powers), None, 32)


def experts_on(device: torch.device, num_experts: int, n: int, k: int) -> tuple[Mxfp4Experts, list[QuantizedArray]]:
    """Return experts that are alike where they are many: `DISTINCT` of them are made, and take turns."""
    arrays = [random_array(n, k, seed=seed) for seed in range(min(num_experts, DISTINCT))]
    matrices = [Mxfp4Matrix.of(array, device) for array in arrays]
    turns = [expert % len(arrays) for expert in range(num_experts)]
    return Mxfp4Experts.of([matrices[turn] for turn in turns]), [arrays[turn] for turn in turns]


@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (3, 128), (7, 160), (16, 2880)])
def test_what_is_laid_out_is_all_there(n: int, k: int) -> None:
    array = random_array(n, k, exponents=(0, 128))
    matrix = Mxfp4Matrix.of(array, CPU)
    assert matrix.shape == (n, k)
    np.testing.assert_array_equal(unpack(matrix).numpy(), array.dequantize())
    assert matrix.words.nbytes + matrix.scales.nbytes == mxfp4_nbytes(n, k)


def test_parts_of_a_weight_are_laid_out_as_ranks_and_families_cut_them() -> None:
    array = random_array(6, 256)
    for part in (array.columns(32, 192), array.rows(slice(1, None, 2)), array.rows(slice(2, 4)).columns(224, 256)):
        np.testing.assert_array_equal(unpack(Mxfp4Matrix.of(part, CPU)).numpy(), part.dequantize())


def test_only_scales_that_a_kernel_can_multiply_by_are_kept() -> None:
    array = random_array(2, 64, exponents=(0, 128))
    assert can_keep(array)
    assert array.scales is not None
    for scale in (4.0, 0.75):
        scales = array.scales.copy()
        scales[1, 1] = scale
        assert not can_keep(QuantizedArray("fp4", array.codes, scales, None, 32))
    assert not can_keep(QuantizedArray("fp4", array.codes, np.ones((2, 4), np.float32), None, 16))
    assert not can_keep(QuantizedArray("int4", array.codes.view(np.int8), array.scales, None, 32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_code_and_scale_becomes_its_number(dtype: torch.dtype, device: torch.device) -> None:
    """A product with the rows of a unit matrix is the weight itself."""
    exponents = (104, 128) if dtype == torch.float16 else (0, 128)  # below, half precision rounds
    array = random_array(64, 128, exponents)
    weights = Mxfp4Experts.of([Mxfp4Matrix.of(array, device)])
    x = torch.eye(128, dtype=dtype, device=device)
    out = torch.empty(128, 64, dtype=dtype, device=device)
    grouped_mxfp4(x, weights, align_experts(torch.zeros(128, 1, dtype=torch.int64, device=device), 1, 16), out)
    expected = torch.from_numpy(array.dequantize()).T
    is_subnormal = expected.abs() < 2.0**-126  # tensor cores may make 0 of them
    assert torch.equal(out.cpu().float().masked_fill(is_subnormal, 0), expected.masked_fill(is_subnormal, 0))


def executed(instructions: str, words: npt.NDArray[Any]) -> dict[str, tuple[str, npt.NDArray[Any]]]:
    """Return what is multiplied in the end: by the name of the product the factor's, and the other factor."""
    registers, products = {"$4": words}, {}
    operations = {"and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift, "mul": np.multiply}
    for line in instructions.strip("{} \n").split(";"):
        operation, *names = line.replace(",", " ").split() or [".reg"]
        if operation.startswith("mul.rn."):
            products[names[0]] = names[2], registers[names[1]]
        elif operation.startswith("shf.l.wrap."):
            registers[names[0]] = np.left_shift(words, 6) | np.right_shift(words, 32 - 6)
            assert names[1:] == ["$4", "$4", "6"]
        elif operation != ".reg":
            values: list[Any] = [
                np.uint32(int(name, 0)) if name[0].isdigit() else registers[name] for name in names[1:]
            ]
            registers[names[0]] = operations[operation.partition(".")[0]](*values)
    return products


@pytest.mark.parametrize(
    ("instructions", "shift", "dtype", "bias"),
    [(TO_BFLOAT16.value, 16, np.uint32, BIAS), (TO_FLOAT16.value, 0, np.uint16, 14)],
)
def test_the_instructions_of_gpus_make_the_numbers_of_all_words(
    instructions: str, shift: int, dtype: type, bias: int
) -> None:
    """Which the interpreter does not run."""
    words = np.arange(65536, dtype=np.uint32)
    products = executed(instructions, words << 16 | words[::-1])
    places = (15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14)
    for part, bits_of_code in enumerate(places):
        factor, bits = products[f"${part}"]
        assert factor == f"${part + 5}"
        beside = (words, words[::-1])[:: -1 if part == 3 else 1]  # the fourth is in the neighbour's word
        for half, word in zip((bits >> 16, bits & 0xFFFF), beside, strict=True):
            numbers = (half.astype(dtype) << shift).view({2: np.float16, 4: np.float32}[np.dtype(dtype).itemsize])
            codes = sum((word >> bit & 1) << place for place, bit in zip((3, 2, 1, 0), bits_of_code, strict=True))
            np.testing.assert_array_equal(numbers.astype(np.float64) * 2.0**bias, FP4_VALUES[codes])


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        *((block, dtype) for block in (8, 128) for dtype in (torch.float32, torch.float16)),
        *(on_gpu(block, torch.bfloat16) for block in MXFP4_BLOCKS),
    ],
)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "choices", "n", "k"),
    [(1, 4, 2, 40, 160), (9, 5, 3, 70, 96), on_gpu(1, 128, 4, 5760, 2880), on_gpu(64, 128, 4, 2880, 1440)],
)
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
    """A row of each token with a bias, as gates and ups, and one of each assignment without, as downs."""
    weights, arrays = experts_on(device, num_experts, n, k)
    chosen = torch.rand(num_tokens, num_experts, device=device).topk(choices).indices
    bias = torch.randn(num_experts, n, device=device).to(dtype)
    aligned = align_experts(chosen, num_experts, block)
    for num_rows, added in ((num_tokens, bias), (chosen.numel(), None)):
        x = torch.randn(num_rows, k, device=device).to(dtype)
        out = torch.full((chosen.numel(), n), torch.nan, dtype=dtype, device=device)
        grouped_mxfp4(x, weights, aligned, out, added)
        expected = reference_grouped_quantized(x, arrays, chosen)
        if added is not None:
            expected += added[chosen.flatten()].double()
        bound = TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound * k**0.5 + 2**-21 * k)


@pytest.mark.parametrize("num_rows", [most + more for most, _ in TILES_OF_FEW for more in (0, 1)])
def test_every_tile_multiplies_alike(num_rows: int, device: torch.device) -> None:
    weights, _ = experts_on(device, 4, 300, 416)
    chosen, x = torch.rand(5, 4, device=device).topk(2).indices, torch.randn(5, 416, device=device).half()
    aligned, outs = align_experts(chosen, 4, MXFP4_BLOCKS[0]), torch.full((2, 10, 300), torch.nan, device=device).half()
    grouped_mxfp4(x, weights, aligned, outs[0], tile=TILES[MXFP4_BLOCKS[0]])
    grouped_mxfp4(x, weights, aligned, outs[1], tile=tile_of(aligned.block, x.dtype, num_rows))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0 if device.type == "cuda" else 1e-2)


@pytest.mark.parametrize("block", [on_gpu(block) for block in MXFP4_BLOCKS])  # NumPy's products do depend on the place
def test_a_token_comes_out_the_same_bit_for_bit_beside_any_others(block: int, device: torch.device) -> None:
    weights, _ = experts_on(device, 4, 24, 96)
    chosen, x = torch.rand(20, 4, device=device).topk(2).indices, torch.randn(20, 96, device=device).half()
    outs = []
    for some in (slice(0, 20), slice(13, 16)):
        out = torch.full((chosen[some].numel(), 24), torch.nan, dtype=x.dtype, device=device)
        grouped_mxfp4(x[some], weights, align_experts(chosen[some].contiguous(), 4, block), out)
        outs.append(out)
    assert torch.equal(outs[0][26:32], outs[1])


def matrices(ops: Ops, arrays: list[QuantizedArray], part: str) -> list[Any]:
    return [
        ops.matrix(f"0.experts.{i}.{part}", QuantizedWeight((array,)), Split.ROWS) for i, array in enumerate(arrays)
    ]


def forward(
    ops: Ops, gate_up: list[QuantizedArray], down: list[QuantizedArray], x: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """Return what gpt-oss's experts make of `x`."""
    ffn, hidden = down[0].shape[1], x.shape[1]
    bias = torch.linspace(-1, 1, len(down) * 2 * ffn, device=x.device).view(len(down), -1).to(x.dtype)
    activate = activate_of(ops, ClampedSwiglu(alpha=1.702, limit=7.0))
    each = matrices(ops, gate_up, "gate_up"), matrices(ops, down, "down")
    out = torch.full((len(x), hidden), torch.nan, dtype=x.dtype, device=x.device)
    ops.experts(*each, (2 * ffn, ffn), activate, bias).forward(x, chosen, shares, out)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden", "ffn"), [(1, 4, 96, 64), (21, 3, 96, 64), on_gpu(50, 8, 2880, 1440)]
)
def test_networks_compute_what_expanded_ones_would(
    num_tokens: int, num_experts: int, hidden: int, ffn: int, is_kept: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Also where one of them has a scale that is not kept in four bits."""
    gate_up, down = (
        [random_array(*shape, seed=i) for i in range(num_experts)] for shape in ((2 * ffn, hidden), (hidden, ffn))
    )
    if not is_kept:
        scales = down[1].scales
        assert scales is not None
        scales[0, 0] = 4
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    shares, chosen = torch.rand(num_tokens, num_experts, device=device).softmax(dim=-1).topk(2)
    out, expected = (
        forward(ops, gate_up, down, x, chosen, shares.to(dtype))
        for ops in (GpuOps(dtype, device), TorchOps(dtype, device))
    )
    assert (out.double() - expected.double()).norm() <= 4 * TOLERANCES[dtype] * expected.double().norm()


def test_experts_alone_are_kept_in_four_bits() -> None:
    ops, array = GpuOps(torch.float32, CPU), random_array(8, 64)
    weight = QuantizedWeight((array,))
    kept, expanded = (ops.matrix(name, weight, Split.ROWS) for name in ("0.experts.3.down", "0.o"))
    assert isinstance(kept, PackedMatrix)
    assert isinstance(expanded, GpuMatrix)
    ids, x = torch.tensor([5, 0]), torch.randn(3, 64)
    assert torch.equal(kept.rows(ids), expanded.rows(ids))
    products = torch.empty(2, 3, 8)
    kept.multiply(x, products[0])
    expanded.multiply(x, products[1])
    assert torch.equal(products[0], products[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("block", MXFP4_BLOCKS)
def test_packed_and_expanded_experts_agree_at_the_size_of_gpt_oss(block: int) -> None:
    device = torch.device("cuda")
    packed, arrays = experts_on(device, 8, 5760, 2880)
    expanded = ExpertWeights.of([torch.from_numpy(each.dequantize()).to(device).bfloat16() for each in arrays])
    chosen = torch.rand(300, 8, device=device).topk(4).indices
    x = torch.randn(300, 2880, device=device).bfloat16()
    outs = torch.empty(2, 1200, 5760, device=device, dtype=torch.bfloat16)
    packed.multiply(x, align_experts(chosen, 8, block), chosen, outs[0])
    expanded.multiply(x, align_experts(chosen, 8, BLOCKS[-1]), chosen, outs[1])
    torch.testing.assert_close(outs[0], outs[1], rtol=1.6e-2, atol=1e-2)
