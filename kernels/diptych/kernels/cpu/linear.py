"""Matrix products with weights packed once, which may stay quantised. See linear.h and quantized.h for the layouts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load
from diptych.kernels.quantized import Code, QuantizedArray

CODES: Final[dict[Code, int]] = {"int4": 0, "int8": 1, "fp8": 2, "float16": 3, "bfloat16": 4}  # as in quantized.h


class PackedMatrix:
    """A weight `[num_rows, num_columns]`, float32. The original may be dropped."""

    def __init__(self, weight: Tensor) -> None:
        self._library = load()
        self._panel: int = self._library.diptych_panel()
        self.num_rows, self.num_columns = weight.shape
        num_panels = -(-self.num_rows // self._panel)
        self._packed = torch.empty(num_panels, self.num_columns, self._panel)
        self._address = address(self._packed)
        self._library.diptych_pack(address(weight), self.num_rows, self.num_columns, self._address)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`out = x @ weight.T`: `[num_tokens, num_columns]` -> `[num_tokens, num_rows]`."""
        num_tokens, num_columns = x.shape
        assert num_columns == self.num_columns, (x.shape, self.num_columns)
        assert out.shape == (num_tokens, self.num_rows), (out.shape, self.num_rows)
        self._library.diptych_linear(address(x), num_tokens, num_columns, self._address, self.num_rows, address(out))

    def rows(self, ids: Tensor) -> Tensor:
        """Return `weight[ids]`."""
        return self._packed[ids // self._panel, :, ids % self._panel]


class _Weight(ctypes.Structure):
    """`struct quantized`."""

    _fields_ = (
        ("packed", c_void_p),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("group", c_int64),
        ("code", c_int64),
        ("scale_bytes", c_int64),
        ("has_mins", c_int64),
    )


class QuantizedMatrix:
    """A weight `[num_rows, num_columns]`, packed once. The original may be dropped."""

    def __init__(self, weight: QuantizedArray) -> None:
        self._library = load()
        self.num_rows, self.num_columns = weight.shape
        scale_bytes = 0 if weight.scales is None else weight.scales.itemsize
        sizes = (self.num_rows, self.num_columns, weight.group or self.num_columns)
        self._weight = _Weight(0, *sizes, CODES[weight.code], scale_bytes, weight.mins is not None)
        num_panels = -(-self.num_rows // self._library.diptych_panel())
        nbytes = num_panels * self._library.diptych_panel_bytes(ctypes.byref(self._weight))
        self._packed = torch.empty(-(-nbytes // 4))
        self._weight.packed = address(self._packed)
        wanted = (weight.codes, weight.scales, weight.mins)
        arrays = [np.ascontiguousarray(np.empty(0) if each is None else each) for each in wanted]
        addresses = [each.ctypes.data for each in arrays]
        failed = self._library.diptych_pack_quantized(ctypes.byref(self._weight), *addresses)
        assert not failed, weight.format

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`out = x @ weight.T`: `[num_tokens, num_columns]` -> `[num_tokens, num_rows]`."""
        num_tokens, num_columns = x.shape
        assert num_columns == self.num_columns, (x.shape, self.num_columns)
        assert out.shape == (num_tokens, self.num_rows), (out.shape, self.num_rows)
        self.multiply_into(x, address(out), self.num_rows)

    def multiply_into(self, x: Tensor, out: int, stride: int) -> None:
        """`multiply` to rows that begin at the address `out`, `stride` floats apart."""
        weight = ctypes.byref(self._weight)
        self._library.diptych_quantized_linear(weight, address(x), len(x), out, stride)

    def rows(self, ids: Tensor) -> Tensor:
        """Return `weight[ids]`, dequantised."""
        out, ids = torch.empty(len(ids), self.num_columns), ids.contiguous()
        assert ids.dtype == torch.int64, ids.dtype
        weight = ctypes.byref(self._weight)
        self._library.diptych_quantized_rows(weight, ids.data_ptr(), len(ids), address(out))
        return out


class StackedMatrix:
    """Matrices of different formats on top of each other: a product is one call each."""

    def __init__(self, parts: Sequence[QuantizedMatrix]) -> None:
        self._parts = parts
        self.num_rows, self.num_columns = sum(part.num_rows for part in parts), parts[0].num_columns

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`out = x @ weight.T`: `[num_tokens, num_columns]` -> `[num_tokens, num_rows]`."""
        assert x.shape[1] == self.num_columns, (x.shape, self.num_columns)
        assert out.shape == (len(x), self.num_rows), (out.shape, self.num_rows)
        at = address(out)
        for part in self._parts:
            part.multiply_into(x, at, self.num_rows)
            at += part.num_rows * out.itemsize

    def rows(self, ids: Tensor) -> Tensor:
        """Return `weight[ids]`, dequantised."""
        out, first = torch.empty(len(ids), self.num_columns), 0
        for part in self._parts:
            inside = (ids >= first) & (ids < first + part.num_rows)
            out[inside] = part.rows(ids[inside] - first)
            first += part.num_rows
        return out
