"""A weight in a few bits, row by row: what loaders hand over and kernels lay out. numpy only.

A weight is `code * scale + min`. Scales belong to `group` consecutive columns of one row. Codes are signed, or unsigned
where there are mins. Rule: nothing is rounded on the way from a file to here.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from diptych.common.errors import ConfigError
from diptych.kernels import page_pack
from diptych.kernels.page_pack import widen

Array = npt.NDArray[Any]
Code = Literal["int4", "fp4", "int8", "fp8", "float16", "bfloat16"]  # fp4: e2m1, fp8: e4m3
CODE_DTYPES: Final[dict[Code, type]] = {
    "int4": np.int8,
    "fp4": np.uint8,
    "int8": np.int8,
    "fp8": np.uint8,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
FOUR_BITS: Final = ("int4", "fp4")
NIBBLES: Final = 8  # four-bit codes are packed by so many columns

MXFP4_GROUP: Final = 32  # columns of a scale
STRIP: Final = 128  # columns of experts in four bits that lie together on GPUs
INT4_GROUPS: Final = (32, 64, STRIP)  # columns of a scale that GPUs keep in four bits; multiples of a strip are, too

# e2m1: one bit of mantissa, a bias of 1; the fourth bit is the sign. No infinity, no NaN.
FP4_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# e4m3: the value of each byte (Micikevicius et al., 2022). No infinity; 0x7F and 0xFF are NaN.
FP8_VALUES: Final = np.where(np.abs(page_pack.FP8_VALUES) > 448, np.float32(np.nan), page_pack.FP8_VALUES)


@dataclass(frozen=True, slots=True)
class QuantizedArray:
    """A weight `[num_rows, num_columns]`. Two-byte codes have no scales."""

    code: Code
    codes: Array  # [num_rows, num_columns], one entry a weight; uint8 where there are mins
    scales: Array | None = None  # [num_rows, num_groups], float16 or float32
    mins: Array | None = None  # like scales
    group: int = 0  # columns a scale; 0: all

    def __post_init__(self) -> None:
        assert self.codes.ndim == 2, self.codes.shape
        assert self.codes.dtype == (CODE_DTYPES[self.code] if self.mins is None else np.uint8), self.codes.dtype
        for factors in (self.scales, self.mins):
            assert factors is None or factors.shape == (len(self.codes), self.num_groups), factors.shape
        if self.code in FOUR_BITS:
            assert self.group % NIBBLES == 0, self.group
            assert self.codes.shape[1] % NIBBLES == 0, self.codes.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def num_groups(self) -> int:
        return -(-self.codes.shape[1] // self.group) if self.group else 1

    @property
    def nbytes(self) -> int:
        """The bytes of the packed form."""
        bits = {"int4": 4, "fp4": 4, "int8": 8, "fp8": 8, "float16": 16, "bfloat16": 16}[self.code]
        return self.codes.size * bits // 8 + sum(each.nbytes for each in (self.scales, self.mins) if each is not None)

    @property
    def format(self) -> tuple[Any, ...]:
        """Arrays of equal format and width can be stacked."""
        scale_dtype = None if self.scales is None else self.scales.dtype
        return self.code, self.group, scale_dtype, self.mins is None, self.codes.shape[1]

    def rows(self, index: Any) -> QuantizedArray:
        """Return some rows, in the order of `index` (a slice or row numbers)."""
        scales = None if self.scales is None else self.scales[index]
        mins = None if self.mins is None else self.mins[index]
        return QuantizedArray(self.code, self.codes[index], scales, mins, self.group)

    @property
    def unit(self) -> int:
        """How many neighbouring columns can't be parted: they share a scale, or a byte."""
        return self.group or (NIBBLES if self.code in FOUR_BITS else 1)

    def columns(self, start: int, end: int) -> QuantizedArray:
        """Return the columns `[start, end)`. Raises `ConfigError` where that would divide a group, or a byte."""
        width, unit = self.codes.shape[1], self.unit
        if start % unit or (end % unit and end != width):
            raise ConfigError(
                f"columns {start} to {end} of {width} divide a group of {unit} that {self.code} codes share: "
                "use fewer tensor-parallel ranks, or quantization 'none'"
            )
        groups = slice(start // self.group, -(-end // self.group)) if self.group else slice(None)
        scales = None if self.scales is None else self.scales[:, groups]
        mins = None if self.mins is None else self.mins[:, groups]
        return QuantizedArray(self.code, self.codes[:, start:end], scales, mins, self.group)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return the weights: the reference of every kernel."""
        few = {"fp4": FP4_VALUES, "fp8": FP8_VALUES}.get(self.code)
        values: npt.NDArray[np.float32] = widen(self.codes, self.code) if few is None else few[self.codes]
        if self.scales is None:
            return values
        return values * self._spread(self.scales) + (0 if self.mins is None else self._spread(self.mins))

    def _spread(self, factors: Array) -> Array:
        width = self.codes.shape[1]
        return np.repeat(factors.astype(np.float32), self.group or width, axis=1)[:, :width]


def mxfp4_nbytes(num_rows: int, num_columns: int) -> int:
    """Return what GPUs keep of an MXFP4 weight: in strips of `STRIP` columns, a byte a scale."""
    num_strips = -(-num_columns // STRIP)
    return num_rows * num_strips * (STRIP // 2 + STRIP // MXFP4_GROUP)


def int4_nbytes(num_rows: int, num_columns: int, group: int) -> int:
    """Return what GPUs keep of an expert in four bits: in strips, four bytes a scale and its zero point."""
    num_strips = -(-num_columns // STRIP)
    return num_rows * num_strips * (STRIP // 2 + STRIP // min(group or STRIP, STRIP) * 4)


def stack(arrays: Sequence[QuantizedArray]) -> QuantizedArray:
    """Put arrays of equal format on top of each other."""
    first = arrays[0]
    assert all(each.format == first.format for each in arrays), [each.format for each in arrays]
    if len(arrays) == 1:
        return first
    if all(repeats(each.codes) for each in arrays) and len({each.codes.flat[0] for each in arrays}) == 1:
        codes = np.broadcast_to(first.codes[:1, :1], (sum(len(each) for each in arrays), first.shape[1]))
    else:
        codes = _stacked(arrays)
    scales, mins = _concatenated([each.scales for each in arrays]), _concatenated([each.mins for each in arrays])
    return QuantizedArray(first.code, codes, scales, mins, first.group)


def repeats(array: Array) -> bool:
    """Whether it is one number, seen again and again: then it has no memory of its own."""
    return array.size > 0 and not any(array.strides)


def _stacked(arrays: Sequence[QuantizedArray]) -> Array:
    first = arrays[0]
    codes = _allocate((sum(len(each) for each in arrays), first.shape[1]), first.codes.dtype)
    np.concatenate([each.codes for each in arrays], out=codes)
    return codes


def _allocate(shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Return memory that goes back to the system when it is dropped; malloc would keep much of it."""
    return np.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _concatenated(factors: Sequence[Array | None]) -> Array | None:
    present = [each for each in factors if each is not None]
    return np.concatenate(present) if present else None
