"""Products with quantised weights: to the bit those of the dequantised weights, for any number of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.linear import PackedMatrix, QuantizedMatrix, StackedMatrix
from diptych.kernels.quantized import Array, Code, QuantizedArray, stack

KINDS: list[tuple[Code, int, type | None, bool]] = [  # code, columns a scale, type of scales, has mins
    ("int4", 32, np.float16, False),
    ("int4", 32, np.float16, True),
    ("int4", 16, np.float32, False),
    ("int4", 128, np.float32, True),
    ("int8", 32, np.float16, False),
    ("int8", 32, np.float16, True),
    ("int8", 0, np.float32, False),
    ("int8", 16, np.float32, True),
    ("fp8", 128, np.float32, False),
    ("fp8", 0, np.float32, False),
    ("float16", 0, None, False),
    ("bfloat16", 0, None, False),
]
KIND_NAMES = ["-".join(str(getattr(each, "__name__", each)) for each in kind) for kind in KINDS]
SHAPES = [(1, 16), (33, 64), (100, 2304), (200, 160)]  # rows, columns
NUM_TOKENS = [1, 2, 3, 5, 8, 11, 16, 17, 390]


def quantized(
    shape: tuple[int, int], code: Code, group: int, scale_dtype: type | None, has_mins: bool
) -> QuantizedArray:
    """Random codes. Factors have few bits, as in the formats there are: a code times a scale is exact in float32."""
    random = np.random.default_rng(0)
    if scale_dtype is None:
        return QuantizedArray(code, half(random.standard_normal(shape), code))
    num_groups = -(-shape[1] // group) if group else 1
    low, high = {"int4": (-8, 8), "int8": (-128, 128), "fp8": (0, 127)}[code]
    codes = random.integers(low, high, shape) - (low if has_mins else 0)
    scales, mins = random.standard_normal((2, shape[0], num_groups)).astype(np.float16).astype(scale_dtype)
    dtype = np.uint8 if has_mins or code == "fp8" else np.int8
    return QuantizedArray(code, codes.astype(dtype), scales, mins if has_mins else None, group)


def half(values: Array, code: Code) -> Array:
    if code == "float16":
        return values.astype(np.float16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def inputs(num_tokens: int, num_columns: int) -> Tensor:
    return torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(1))


def multiply(matrix: PackedMatrix | QuantizedMatrix | StackedMatrix, x: Tensor) -> Tensor:
    out = torch.full((len(x), matrix.num_rows), torch.nan)
    matrix.multiply(x, out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_products_have_the_bits_of_the_dequantised_weights(
    kind: tuple[Code, int, type | None, bool], shape: tuple[int, int], num_threads: int
) -> None:
    weight = quantized(shape, *kind)
    expected = PackedMatrix(torch.from_numpy(weight.dequantize()))
    matrix = QuantizedMatrix(weight)
    for num_tokens in NUM_TOKENS:
        x = inputs(num_tokens, shape[1])
        assert torch.equal(multiply(matrix, x), multiply(expected, x)), num_tokens


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_rows_come_back_dequantised(kind: tuple[Code, int, type | None, bool]) -> None:
    weight = quantized((70, 2304), *kind)
    ids = torch.tensor([69, 0, 31, 32, 33, 0])
    assert torch.equal(QuantizedMatrix(weight).rows(ids), torch.from_numpy(weight.dequantize())[ids])


def test_every_byte_of_fp8_is_what_torch_reads() -> None:
    """But for its NaN: loaders refuse weights that have one."""
    codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255])
    weight = QuantizedArray("fp8", codes[None], np.ones((1, 1), np.float32))
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.from_numpy(weight.dequantize())[0], expected)
    assert torch.equal(QuantizedMatrix(weight).rows(torch.tensor([0]))[0], expected)


def test_halves_are_read_down_to_the_smallest() -> None:
    bits = np.arange(0, 0x7C00, 31, dtype=np.uint16)
    matrix = QuantizedMatrix(QuantizedArray("float16", bits.view(np.float16)[None]))
    assert torch.equal(matrix.rows(torch.tensor([0]))[0], torch.from_numpy(bits.view(np.float16)).float())


def test_matrices_of_different_formats_on_top_of_each_other_are_one() -> None:
    parts = [quantized((rows, 64), *kind) for rows, kind in zip((40, 7, 64), KINDS[1:4], strict=True)]
    stacked = StackedMatrix([QuantizedMatrix(part) for part in parts])
    dense = torch.cat([torch.from_numpy(part.dequantize()) for part in parts])
    for num_tokens in (1, 20):
        x = inputs(num_tokens, 64)
        assert torch.equal(multiply(stacked, x), multiply(PackedMatrix(dense), x))
    ids = torch.tensor([110, 0, 39, 40, 46, 47])
    assert torch.equal(stacked.rows(ids), dense[ids])


def test_arrays_of_one_format_stack_to_one_array() -> None:
    whole = quantized((10, 64), "int4", 32, np.float16, True)
    again = stack([whole.rows(slice(0, 3)), whole.rows(slice(3, 10))])
    np.testing.assert_array_equal(again.dequantize(), whole.dequantize())


def test_memory_is_what_the_codes_and_scales_take() -> None:
    weight = quantized((64, 256), "int4", 32, np.float16, True)
    assert QuantizedMatrix(weight).nbytes == weight.nbytes == 64 * 256 // 2 + 2 * 2 * 64 * 8


def test_a_kind_without_a_kernel_is_caught_when_packed() -> None:
    weight = QuantizedArray("fp8", np.zeros((1, 8), np.uint8), np.ones((1, 1), np.float16))
    with pytest.raises(AssertionError):
        QuantizedMatrix(weight)
