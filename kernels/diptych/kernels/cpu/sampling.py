"""Tokens, their log-probabilities and masks over rows of float32 logits `[num_rows, vocab_size]`. See sampling.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from diptych.kernels.cpu.library import address, load

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

OUT_OF_MEMORY: Final = -2


class _Sampling(ctypes.Structure):
    """`struct sampling`."""

    _fields_ = (
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("token_ids", c_void_p),
    )


class _Logprobs(ctypes.Structure):
    """`struct logprobs`."""

    _fields_ = (
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("token_ids", c_void_p),
        ("num_top", c_int64),
        ("logprobs", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
    )


class _TokenMask(ctypes.Structure):
    """`struct token_mask`."""

    _fields_ = (("logits", c_void_p), ("num_rows", c_int64), ("vocab_size", c_int64), ("words", c_void_p))


def sample(
    logits: Tensor, temperature: F32, top_p: F32, top_k: I64, min_p: F32 | None, seeds: U64, positions: I64
) -> I64:
    """Return the chosen tokens; -1 for a row whose largest logit is NaN or infinite. Parameters are `[num_rows]`."""
    num_rows, vocab_size = logits.shape
    token_ids = np.empty(num_rows, dtype=np.int64)
    floats = [_array(values, np.float32, (num_rows,)) for values in (temperature, top_p, min_p)]
    integers = [_array(top_k, np.int64, (num_rows,)), _array(seeds, np.uint64, (num_rows,))]
    integers += [_array(values, np.int64, (num_rows,)) for values in (positions, token_ids)]
    load().diptych_sample(ctypes.byref(_Sampling(address(logits), num_rows, vocab_size, *floats, *integers)))
    if (token_ids == OUT_OF_MEMORY).any():
        raise MemoryError("no memory to sample")
    return token_ids


def logprobs(logits: Tensor, token_ids: I64, num_top: int) -> tuple[F32, I64, F32]:
    """Return the log-probabilities of `token_ids` `[num_rows]`, and the likeliest tokens and theirs, best first."""
    num_rows, vocab_size = logits.shape
    assert 0 <= num_top <= vocab_size, (num_top, vocab_size)
    own = np.empty(num_rows, dtype=np.float32)
    top_ids, top = np.empty((num_rows, num_top), dtype=np.int64), np.empty((num_rows, num_top), dtype=np.float32)
    ids = _array(token_ids, np.int64, (num_rows,))
    results = (own.ctypes.data, top_ids.ctypes.data, top.ctypes.data)
    load().diptych_logprobs(ctypes.byref(_Logprobs(address(logits), num_rows, vocab_size, ids, num_top, *results)))
    return own, top_ids, top


def forbid(logits: Tensor, token_mask: I32) -> None:
    """Set to minus infinity, in place, what `token_mask` `[num_rows, ceil(vocab_size / 32)]` does not allow."""
    num_rows, vocab_size = logits.shape
    words = _array(token_mask, np.int32, (num_rows, -(-vocab_size // 32)))
    load().diptych_forbid(ctypes.byref(_TokenMask(address(logits), num_rows, vocab_size, words)))


def _array(values: npt.NDArray[Any] | None, dtype: type, shape: tuple[int, ...]) -> int | None:
    """Return where a dense array lies, or NULL."""
    if values is None:
        return None
    assert values.dtype == dtype, (values.dtype, dtype)
    assert values.shape == shape, (values.shape, shape)
    assert values.flags.c_contiguous
    return values.ctypes.data
