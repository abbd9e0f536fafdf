"""Builds and opens the C library. Calls release the GIL and share one thread pool a process."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from diptych.common.native import declare
from diptych.kernels.cpu import build

SIGNATURES: Final[dict[str, tuple[type | None, list[type]]]] = {
    "set_num_threads": (c_int, [c_int]),
    "panel": (c_int64, []),
    "pack": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "linear": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "use_huge_pages": (None, [c_void_p, c_int64]),
    "packed_a_floats": (c_int64, [c_int64] * 2),
    "pack_a": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "add_low_rank": (
        c_int,
        [c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_void_p, c_int64, c_int64],
    ),
    "panel_bytes": (c_int64, [c_void_p]),
    "pack_quantized": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "quantized_linear": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
    "quantized_rows": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "add_rms_norm": (None, [c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p]),
    "silu_and_mul": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "gelu_tanh_and_mul": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "clamped_swiglu": (None, [c_void_p, c_int64, c_int64, c_float, c_float, c_void_p]),
    "norm_heads": (None, [c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_int64, c_int64]),
    "mul_sigmoid": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "delta_rule": (c_int, [*[c_void_p] * 3, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p]),
    "kimi_delta": (None, [*[c_void_p] * 6, c_int64]),
    "state_spaces": (None, [*[c_void_p] * 5, c_int64]),
    "decode_attention": (None, [c_void_p] * 4),
    "extend_attention": (c_int, [c_void_p] * 4),
    "choose": (c_int, [*[c_void_p] * 3, c_int64, c_void_p]),
    "sparse_attention": (None, [*[c_void_p] * 4, c_int64, c_void_p]),
    "sample": (None, [c_void_p]),
    "logprobs": (None, [c_void_p]),
    "forbid": (None, [c_void_p]),
    "pack_rows": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "unpack_page": (None, [c_void_p, c_void_p, c_void_p]),
}


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, compiling it at the first call on this machine. Raises `ConfigError` without a compiler."""
    return declare(ctypes.CDLL(str(build())), "diptych", SIGNATURES)


def set_num_threads(num_threads: int) -> int:
    """Compute with `num_threads` threads, the caller's included; return how many the system allowed."""
    count: int = load().diptych_set_num_threads(num_threads)
    return count


def slots_of(tensor: Tensor) -> tuple[int, int]:
    """Return where the first of float32 `[num_slots, ...]` lies, and how far it is to the next. Each one is dense."""
    assert tensor.dtype == torch.float32, tensor.dtype
    assert tensor[0].is_contiguous(), tensor.stride()
    return tensor.data_ptr(), tensor.stride(0)


def address(tensor: Tensor) -> int:
    """Return where a dense float32 tensor lies. The kernels read it as such and check nothing."""
    assert tensor.dtype == torch.float32, tensor.dtype
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
