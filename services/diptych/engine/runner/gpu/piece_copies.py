"""Copies of many pieces between host memory and a GPU, queued with little work of the host.

A call for each piece took the host some 20 us through torch: for 512 pages of 2 MiB each way 20 ms, in which no step
was queued. The driver of CUDA 13 has one call for a batch of copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch

from diptych.common.arrays import I64

STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to them

Call = Callable[..., int]


class PieceCopies(Protocol):
    """Queues copies on the current stream of torch, in any order among themselves."""

    def copy(self, to: I64, source: I64, nbytes: I64) -> None:
        """Copy `nbytes[i]` bytes from the address `source[i]` to `to[i]`, for each i. int64 `[num_pieces]`."""
        ...


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`. Places are hints, for managed memory alone."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchCopies:
    """Implements `PieceCopies` by one `cuMemcpyBatchAsync`, which refuses the default stream."""

    def __init__(self, call: Call, stream: Callable[[], int]) -> None:
        """`stream` returns the handle of the current one."""
        self._call = call
        self._stream = stream
        self._attributes = _Attributes(access_order=STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the copy from which on they hold

    def copy(self, to: I64, source: I64, nbytes: I64) -> None:
        arrays = [np.ascontiguousarray(array, np.int64) for array in (to, source, nbytes)]
        attributes, first = ctypes.byref(self._attributes), ctypes.byref(self._first)
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        count, stream = ctypes.c_size_t(len(nbytes)), ctypes.c_void_p(self._stream())
        _check(self._call(*addresses, count, attributes, first, ctypes.c_size_t(1), stream))


class SingleCopies:
    """Implements `PieceCopies` by a `cuMemcpyAsync` for each piece."""

    def __init__(self, call: Call, stream: Callable[[], int]) -> None:
        self._call = call
        self._stream = stream

    def copy(self, to: I64, source: I64, nbytes: I64) -> None:
        stream = ctypes.c_void_p(self._stream())
        for pieces in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            _check(self._call(*map(ctypes.c_size_t, pieces), stream))


def piece_copies(driver: Any, stream: Callable[[], int]) -> PieceCopies:
    """Return what copies by this driver's library: piece by piece where it is older than CUDA 13."""
    batch = getattr(driver, "cuMemcpyBatchAsync_v2", None)
    return SingleCopies(driver.cuMemcpyAsync, stream) if batch is None else BatchCopies(batch, stream)


def copies_of_this_driver() -> PieceCopies:
    return piece_copies(ctypes.CDLL("libcuda.so.1"), lambda: int(torch.cuda.current_stream().cuda_stream))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the driver refuses to copy pages (CUDA error {code})")
