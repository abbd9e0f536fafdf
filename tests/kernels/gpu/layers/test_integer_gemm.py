"""Weights in integers: kept, widened and multiplied, against the numpy reference of quantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.engine.models.matrices.gpu_integers import GpuIntegers
from diptych.kernels.gpu.layers import integer_words
from diptych.kernels.gpu.layers.integer_gemm import BLOCKS, IntegerTile, integer_gemm, most_tiles
from diptych.kernels.gpu.layers.integer_matrix import IntegerMatrix, widen
from diptych.kernels.integer_layout import layout_of
from diptych.kernels.quantized import CODE_DTYPES, Array, Code, QuantizedArray

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
CPU = torch.device("cpu")
FORMATS: list[tuple[Code, int, bool, type]] = [  # code, group, whether there are mins, the scales' type
    ("int4", 16, True, np.float32),  # Q2_K
    ("int4", 16, False, np.float32),  # Q3_K
    ("int4", 32, False, np.float16),  # Q4_0
    ("int4", 32, True, np.float16),  # Q4_1
    ("int4", 32, True, np.float32),  # Q4_K
    ("int4", 64, False, np.float16),
    ("int4", 128, False, np.float16),  # GPTQ, symmetric
    ("int4", 128, True, np.float32),  # AWQ
    ("int4", 256, False, np.float16),
    ("int4", 0, True, np.float32),
    ("int8", 16, False, np.float32),  # Q6_K
    ("int8", 32, False, np.float16),  # Q8_0
    ("int8", 32, True, np.float32),  # Q5_K
    ("int8", 128, True, np.float32),  # GPTQ
    ("int8", 0, False, np.float16),  # compressed-tensors
]


def random_array(
    n: int, k: int, code: Code, group: int, has_mins: bool, dtype: type = np.float32, seed: int = 0
) -> QuantizedArray:
    """Return a weight whose numbers are about 1, with codes of the whole range."""
    random, bits = np.random.default_rng(seed), 4 if code == "int4" else 8
    size, half = (n, -(-k // group) if group else 1), 1 << (bits - 1)
    scales: Array = (random.uniform(0.5, 1.5, size) / half).astype(dtype)
    codes = random.integers(0, 2 * half, (n, k))
    if has_mins:
        return QuantizedArray(code, codes.astype(np.uint8), scales, random.normal(size=size).astype(dtype), group)
    return QuantizedArray(code, (codes - half).astype(CODE_DTYPES[code]), scales, None, group)


def product(x: Tensor, array: QuantizedArray) -> Tensor:
    return x.double() @ torch.from_numpy(array.dequantize()).to(x.device).double().T


def multiplied(x: Tensor, array: QuantizedArray, tile: IntegerTile | None = None) -> Tensor:
    matrix = IntegerMatrix.of(array, x.device)
    counters = torch.zeros(most_tiles(len(array)), dtype=torch.int32, device=x.device)
    out = torch.full((len(x), len(array)), torch.nan, dtype=x.dtype, device=x.device)
    for _ in range(2):  # the counters are what they were
        integer_gemm(x, matrix, counters, out, tile)
    return out


def assert_product(out: Tensor, x: Tensor, array: QuantizedArray) -> None:
    bound = TOLERANCES[x.dtype]
    atol = bound * x.shape[1] ** 0.5
    torch.testing.assert_close(out.double(), product(x, array), rtol=bound, atol=atol)


@pytest.mark.parametrize(("code", "group", "has_mins", "dtype"), FORMATS)
@pytest.mark.parametrize(("n", "k"), [(5, 64), (33, 328)])
def test_what_is_kept_is_all_there(
    n: int, k: int, code: Code, group: int, has_mins: bool, dtype: type, device: torch.device
) -> None:
    array = random_array(n, k, code, group, has_mins, dtype)
    matrix, expected = IntegerMatrix.of(array, device), torch.from_numpy(array.dequantize())
    assert matrix.shape == (n, k)
    assert matrix.nbytes == matrix.layout.nbytes(n, k)
    whole, some, ids = torch.empty(n, k), torch.empty(3, k), torch.tensor([4, 0, 4])
    on_device = whole.to(device), some.to(device)
    widen(matrix, slice(0, n), on_device[0])
    widen(matrix, ids.to(device), on_device[1])
    torch.testing.assert_close(on_device[0].cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(on_device[1], on_device[0][ids.to(device)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("code", "group", "has_mins", "scales"), FORMATS)
def test_a_product_is_that_of_the_dequantised_weight(
    code: Code, group: int, has_mins: bool, scales: type, dtype: torch.dtype, device: torch.device
) -> None:
    """The matrix has a size that no tile divides, and programs share its columns."""
    array = random_array(70, 328, code, group, has_mins, scales)
    layout = IntegerMatrix.of(array, CPU).layout
    narrow = dtype != torch.float32
    tile = IntegerTile(16, 64 if narrow else 32, 128 if narrow else layout.strip, 2, 3 if narrow else 2, 4)
    x = torch.randn(5, 328, device=device).to(dtype)
    assert_product(multiplied(x, array, tile), x, array)


@pytest.mark.parametrize("m", [1, 17, *(on_gpu(m) for m in (8, 64, 250))])
@pytest.mark.parametrize(
    ("n", "k", "code", "group", "has_mins", "dtype"),
    [
        (40, 256, "int4", 128, False, torch.float16),
        (33, 97, "int8", 32, True, torch.float32),
        on_gpu(6144, 4096, "int4", 128, False, torch.bfloat16),
        on_gpu(1024, 14_336, "int4", 32, True, torch.bfloat16),
        on_gpu(4096, 4096, "int8", 32, False, torch.bfloat16),
        on_gpu(1000, 4096, "int8", 16, False, torch.bfloat16),
        on_gpu(4096, 4096, "int8", 0, False, torch.bfloat16),
    ],
)
def test_tiles_for_any_number_of_rows_multiply_alike(
    m: int, n: int, k: int, code: Code, group: int, has_mins: bool, dtype: torch.dtype, device: torch.device
) -> None:
    array, x = random_array(n, k, code, group, has_mins), torch.randn(m, k, device=device).to(dtype)
    assert_product(multiplied(x, array), x, array)


@pytest.mark.parametrize("m", [0, 1, 300])
def test_a_matrix_multiplies_any_number_of_rows_into_a_part_of_wider_ones(m: int, device: torch.device) -> None:
    array = random_array(24, 128, "int4", 32, has_mins=True)
    matrix = GpuIntegers.of(array, torch.float32, device)
    assert matrix is not None
    x, wide = torch.randn(m, 128, device=device), torch.full((m, 40), 7.0, device=device)
    matrix.multiply(x, wide[:, 8:32])
    assert_product(wide[:, 8:32], x, array)
    assert torch.equal(matrix.rows(torch.arange(24)), matrix.dense())  # also by numbers that are on the host
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 32:] == 7).all()


def test_a_large_weight_is_widened_a_part_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.engine.models.matrices.gpu_integers.WORKSPACE_NBYTES", 0)
    array, x = random_array(600, 64, "int8", 32, has_mins=False), torch.randn(4, 64, device=device)
    matrix, out = GpuIntegers.of(array, torch.float32, device), torch.empty(4, 600, device=device)
    assert matrix is not None
    matrix.multiply_widened(x, out)
    assert_product(out, x, array)


@pytest.mark.parametrize("group", [8, 24, 48, 96])
def test_groups_that_strips_are_no_multiples_of_are_not_kept(group: int) -> None:
    array = random_array(2, 192, "int4", group, has_mins=False)
    assert layout_of(array) is None
    assert GpuIntegers.of(array, torch.float32, CPU) is None


def test_parts_of_a_weight_are_kept_as_ranks_cut_them(device: torch.device) -> None:
    array, x = random_array(6, 256, "int4", 32, has_mins=False), torch.randn(2, 96, device=device)
    part = array.columns(32, 128).rows(slice(1, None, 2))
    assert_product(multiplied(x, part), x, part)


@pytest.mark.parametrize("m", [on_gpu(m) for m in BLOCKS])
def test_a_row_comes_out_the_same_bit_for_bit_beside_any_others_of_its_block(m: int, device: torch.device) -> None:
    array = random_array(512, 4096, "int4", 128, has_mins=False)
    x = torch.randn(m, 4096, device=device).half()
    whole, fewer = multiplied(x, array), multiplied(x[m // 2 - 1 :].contiguous(), array)
    assert torch.equal(whole[m // 2 - 1 :], fewer)


def executed(instructions: str, words: Array, dtype: type, shift: int) -> dict[str, Array]:
    """Return what the instructions leave in each register, as float64 of both halves."""
    registers: dict[str, Any] = {"$in": words}
    source = "$4" if "$3" in instructions else "$2"

    def value(name: str) -> Any:
        return registers["$in" if name == source else name] if name in {*registers, source} else np.uint32(int(name, 0))

    def numbers(bits: Array) -> Array:
        halves = (np.stack([bits >> 16, bits & 0xFFFF]) << shift).astype(np.uint32 if shift else np.uint16)
        floats: Array = halves.view(dtype).astype(np.float64)
        return floats

    for line in instructions.strip("{} \n").split(";"):
        operation, *names = line.replace(",", " ").split() or [".reg"]
        if operation == "mov.b32":
            registers[names[0]] = value(names[1]) + np.zeros_like(words)
        elif operation == "shr.u32":
            registers[names[0]] = value(names[1]) >> value(names[2])
        elif operation == "lop3.b32":
            assert names[4] == "0xEA"
            registers[names[0]] = value(names[1]) & value(names[2]) | value(names[3])
        elif operation.startswith("sub.rn."):
            registers["of " + names[0]] = numbers(value(names[1])) - numbers(value(names[2]))
    return {name.removeprefix("of "): found for name, found in registers.items() if name.startswith("of ")}


@pytest.mark.parametrize(("name", "bits", "zero"), [("FOUR_TO_", 4, 0), ("SIGNED_FOUR_TO_", 4, 8), ("EIGHT_TO_", 8, 0)])
@pytest.mark.parametrize(("kind", "dtype", "shift"), [("BFLOAT16", np.float32, 16), ("FLOAT16", np.float16, 0)])
def test_the_instructions_of_gpus_make_the_numbers_of_all_words(
    name: str, bits: int, zero: int, kind: str, dtype: type, shift: int
) -> None:
    """Which the interpreter does not run."""
    words = np.arange(65536, dtype=np.uint32)
    found = executed(getattr(integer_words, name + kind).value, words << 16 | words[::-1], dtype, shift)
    assert len(found) == 16 // bits
    for part, numbers in enumerate(found[f"${place}"] for place in range(16 // bits)):
        for word, values in zip((words, words[::-1]), numbers, strict=True):
            code = (word >> (bits * part) & ((1 << bits) - 1)).astype(np.int64) - zero
            expected = np.where(code > 127, code - 256, code) if bits == 8 else code
            np.testing.assert_array_equal(values, expected)
