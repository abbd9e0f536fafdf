"""Experts in integers of four bits, against the numpy reference of quantised weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import on_gpu

from diptych.kernels.gpu.layers.int4_experts import (
    INT4_BLOCKS,
    TILES,
    TILES_OF_FEW,
    TO_BFLOAT16,
    TO_FLOAT16,
    Int4Experts,
    Int4Matrix,
    group_of,
    grouped_int4,
    tile_of,
    unpack,
)
from diptych.kernels.gpu.layers.moe import align_experts, reference_grouped_quantized
from diptych.kernels.quantized import QuantizedArray, int4_nbytes

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
CPU = torch.device("cpu")
DISTINCT = 5


def random_array(n: int, k: int, group: int = 32, has_mins: bool = False, seed: int = 0) -> QuantizedArray:
    """Return a weight of random codes and zero points, with scales of half precision."""
    random = np.random.default_rng(seed)
    scales = random.uniform(0.01, 0.1, (n, -(-k // (group or k)))).astype(np.float16)
    codes = random.integers(0, 16, (n, k), np.uint8)
    if not has_mins:
        return QuantizedArray("int4", (codes - 8).view(np.int8), scales, None, group)
    wide, zeros = scales.astype(np.float32), random.integers(0, 17, scales.shape).astype(np.float32)
    return QuantizedArray("int4", codes, wide, -wide * zeros, group)


def experts_on(
    device: torch.device, num_experts: int, n: int, k: int, group: int
) -> tuple[Int4Experts, list[QuantizedArray]]:
    """Return experts that are alike where they are many: `DISTINCT` of them are made, and take turns."""
    arrays = [random_array(n, k, group, seed % 2 == 0, seed) for seed in range(min(num_experts, DISTINCT))]
    matrices = [Int4Matrix.of([array], device) for array in arrays]
    turns = [expert % len(arrays) for expert in range(num_experts)]
    return Int4Experts.of([matrices[turn] for turn in turns]), [arrays[turn] for turn in turns]


@pytest.mark.parametrize("has_mins", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 32, 32), (5, 96, 32), (3, 192, 64), (7, 200, 0), (4, 256, 128), (3, 512, 256), (2, 64, 0)]
)
def test_what_is_laid_out_is_all_there(n: int, k: int, group: int, has_mins: bool) -> None:
    array = random_array(n, k, group, has_mins)
    assert group_of([array]) == (min(group, 128) or 128)
    matrix = Int4Matrix.of([array], CPU)
    assert matrix.shape == (n, k)
    np.testing.assert_allclose(unpack(matrix).numpy(), array.dequantize(), rtol=2**-20, atol=1e-7)
    assert matrix.words.nbytes + matrix.scales.nbytes == int4_nbytes(n, k, group)


def test_parts_with_and_without_zero_points_lie_on_top_of_each_other() -> None:
    arrays = [random_array(3, 256, 64), random_array(2, 256, 64, has_mins=True).rows(slice(0, 1))]
    assert group_of(arrays) == 64
    expected = np.concatenate([array.dequantize() for array in arrays])
    np.testing.assert_allclose(unpack(Int4Matrix.of(arrays, CPU)).numpy(), expected, rtol=2**-20, atol=1e-7)


def test_parts_of_a_weight_are_laid_out_as_ranks_cut_them() -> None:
    array = random_array(6, 256, 32, has_mins=True)
    for part in (array.columns(32, 192), array.rows(slice(1, None, 2)), array.columns(224, 256)):
        found = unpack(Int4Matrix.of([part], CPU)).numpy()
        np.testing.assert_allclose(found, part.dequantize(), rtol=2**-20, atol=1e-7)


def test_only_what_the_kernel_can_multiply_by_is_kept() -> None:
    array = random_array(2, 64, 32, has_mins=True)
    assert group_of([array]) == 32
    assert array.scales is not None
    assert array.mins is not None
    between = QuantizedArray("int4", array.codes, array.scales, array.mins * np.float32(1.03), 32)
    longer = QuantizedArray("int4", array.codes.view(np.int8), array.scales * np.float32(1.0001), None, 32)
    assert group_of([longer]) is None
    assert group_of([between]) is None
    assert group_of([random_array(2, 64, 16)]) is None
    assert group_of([array, random_array(2, 64, 64)]) is None
    assert group_of([QuantizedArray("int8", array.codes.view(np.int8), array.scales, None, 32)]) is None


@pytest.mark.parametrize("dtype", [torch.float16, on_gpu(torch.bfloat16)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_code_and_zero_point_becomes_its_number(group: int, dtype: torch.dtype, device: torch.device) -> None:
    """A product with the rows of a unit matrix is the weight itself, here one that needs no rounding."""
    random = np.random.default_rng(0)
    codes, zeros = random.integers(0, 16, (64, 128), np.uint8), random.integers(0, 17, (64, 128 // group))
    scales = np.ldexp(np.float32(1), random.integers(-6, 3, zeros.shape))
    array = QuantizedArray("int4", codes, scales, -scales * zeros.astype(np.float32), group)
    weights = Int4Experts.of([Int4Matrix.of([array], device)])
    x = torch.eye(128, dtype=dtype, device=device)
    out = torch.empty(128, 64, dtype=dtype, device=device)
    grouped_int4(x, weights, align_experts(torch.zeros(128, 1, dtype=torch.int64, device=device), 1, 16), out)
    assert torch.equal(out.cpu().float(), torch.from_numpy(array.dequantize()).T)


@pytest.mark.parametrize(
    ("instructions", "dtype", "power"),
    [(TO_BFLOAT16.value, torch.bfloat16, 0x4300), (TO_FLOAT16.value, torch.float16, 0x6400)],
)
def test_the_instructions_of_gpus_make_the_numbers_of_all_words(
    instructions: str, dtype: torch.dtype, power: int
) -> None:
    """Which the interpreter does not run."""
    words = np.arange(65536, dtype=np.uint32)
    registers = {"$4": words << 16 | words[::-1]}
    for line in instructions.strip("{} \n").split(";"):
        operation, *names = line.replace(",", " ").split() or [".reg"]
        if operation == "shr.u32":
            registers[names[0]] = registers[names[1]] >> np.uint32(int(names[2]))
        elif operation == "lop3.b32":
            assert names[4] == "0xEA"  # a & b | c
            registers[names[0]] = registers[names[1]] & np.uint32(int(names[2], 0)) | np.uint32(int(names[3], 0))
        elif operation.startswith("sub.rn."):
            assert names[:2] == [f"${part}" for part in [int(names[0][1:])] * 2]
            assert names[2] == f"${int(names[0][1:]) + 5}"
    for part in range(4):
        found = torch.from_numpy(registers[f"${part}"].view(np.int16).copy()).view(dtype).view(-1, 2)
        for half, word in enumerate((words[::-1], words)):  # the lower half is first
            expected = torch.from_numpy((word >> 4 * part & 15).astype(np.int64))
            assert torch.equal((found[:, half] - torch.tensor(power, dtype=torch.int16).view(dtype)).long(), expected)


@pytest.mark.parametrize(
    ("block", "dtype", "group"),
    [
        (8, torch.float32, 128),
        (8, torch.float16, 32),
        (128, torch.float16, 64),
        *(on_gpu(block, torch.bfloat16, 32 << block % 3) for block in INT4_BLOCKS),
    ],
)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "choices", "n", "k"),
    [(1, 4, 2, 40, 192), (9, 5, 3, 70, 64), on_gpu(1, 128, 8, 3072, 4096), on_gpu(64, 128, 8, 4096, 1536)],
)
def test_each_assignment_is_multiplied_by_its_expert(
    num_tokens: int,
    num_experts: int,
    choices: int,
    n: int,
    k: int,
    block: int,
    dtype: torch.dtype,
    group: int,
    device: torch.device,
) -> None:
    """A row of each token with a bias, as gates and ups, and one of each assignment without, as downs."""
    weights, arrays = experts_on(device, num_experts, n, k, group)
    chosen = torch.rand(num_tokens, num_experts, device=device).topk(choices).indices
    bias = torch.randn(num_experts, n, device=device).to(dtype)
    aligned = align_experts(chosen, num_experts, block)
    for num_rows, added in ((num_tokens, bias), (chosen.numel(), None)):
        x = torch.randn(num_rows, k, device=device).to(dtype)
        out = torch.full((chosen.numel(), n), torch.nan, dtype=dtype, device=device)
        grouped_int4(x, weights, aligned, out, added)
        expected = reference_grouped_quantized(x, arrays, chosen)
        if added is not None:
            expected += added[chosen.flatten()].double()
        bound = TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound * k**0.5 + 2**-21 * k)


@pytest.mark.parametrize("num_rows", [most + more for most, _ in TILES_OF_FEW for more in (0, 1)])
def test_every_tile_multiplies_alike(num_rows: int, device: torch.device) -> None:
    weights, _ = experts_on(device, 4, 300, 448, 64)
    chosen, x = torch.rand(5, 4, device=device).topk(2).indices, torch.randn(5, 448, device=device).half()
    aligned, outs = align_experts(chosen, 4, INT4_BLOCKS[0]), torch.full((2, 10, 300), torch.nan, device=device).half()
    grouped_int4(x, weights, aligned, outs[0], tile=TILES[INT4_BLOCKS[0]])
    grouped_int4(x, weights, aligned, outs[1], tile=tile_of(aligned.block, x.dtype, num_rows))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0 if device.type == "cuda" else 1e-2)


@pytest.mark.parametrize("block", [on_gpu(block) for block in INT4_BLOCKS])  # NumPy's products do depend on the place
def test_a_token_comes_out_the_same_bit_for_bit_beside_any_others(block: int, device: torch.device) -> None:
    weights, _ = experts_on(device, 4, 24, 96, 32)
    chosen, x = torch.rand(20, 4, device=device).topk(2).indices, torch.randn(20, 96, device=device).half()
    outs = []
    for some in (slice(0, 20), slice(13, 16)):
        out = torch.full((chosen[some].numel(), 24), torch.nan, dtype=x.dtype, device=device)
        grouped_int4(x[some], weights, align_experts(chosen[some].contiguous(), 4, block), out)
        outs.append(out)
    assert torch.equal(outs[0][26:32], outs[1])
