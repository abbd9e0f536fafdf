"""Kimi's delta rule and state spaces, token by token. All floats are float32; all but states is dense.

Results are the same bits in any batch, and however a request's text is cut.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load, slots_of


class _Recurrence(ctypes.Structure):
    """`struct recurrence`."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("heads_a_group", c_int64),
        ("kept", c_void_p),
        ("slot_stride", c_int64),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("out", c_void_p),
    )


def kimi_delta(
    queries: Tensor,
    keys: Tensor,
    remains: Tensor,
    values: Tensor,
    betas: Tensor,
    kept: Tensor,
    starts: Tensor,
    slots: Tensor,
    out: Tensor,
) -> None:
    """Let each head's matrix in `kept`, `[num_slots, num_heads, dim, dim]`, fade by `remains`, correct it, and read it.

    `queries`, `keys`, `remains`, `values` and `out` are `[num_tokens, num_heads, dim]`, `betas` `[num_tokens,
    num_heads]`. `starts`, int64 `[batch_size + 1]`: each request's first token, and behind them where the last ones
    end; `slots`, int64 `[batch_size]`, no two alike.
    """
    for each in (queries, keys, remains, values):
        assert each.shape == out.shape, (each.shape, out.shape)
    assert betas.shape == out.shape[:2], (betas.shape, out.shape)
    assert kept.shape[1:] == (*out.shape[1:], out.shape[2]), (kept.shape, out.shape)
    where = _recurrence(kept, 1, starts, slots, out)
    given = [address(each) for each in (queries, keys, remains, values, betas)]
    load().diptych_kimi_delta(ctypes.byref(where), *given, len(slots))


def state_spaces(
    amounts: Tensor,
    writing: Tensor,
    reading: Tensor,
    remains: Tensor,
    kept: Tensor,
    starts: Tensor,
    slots: Tensor,
    out: Tensor,
) -> None:
    """Let each head's matrix in `kept`, `[num_slots, num_heads, dim, size]`, fade by `remains`, write and read it.

    `amounts` and `out` are `[num_tokens, num_heads, dim]`, `writing` and `reading` `[num_tokens, num_groups, size]`,
    `remains` `[num_tokens, num_heads]`; `starts` and `slots` as in `kimi_delta`.
    """
    num_tokens, num_heads, dim = out.shape
    num_groups, size = writing.shape[1:]
    assert amounts.shape == out.shape, (amounts.shape, out.shape)
    assert writing.shape == reading.shape == (num_tokens, num_groups, size), (writing.shape, reading.shape)
    assert remains.shape == (num_tokens, num_heads), (remains.shape, out.shape)
    assert num_heads % num_groups == 0, (num_heads, num_groups)
    assert kept.shape[1:] == (num_heads, dim, size), (kept.shape, out.shape)
    where = _recurrence(kept, num_heads // num_groups, starts, slots, out)
    given = [address(each) for each in (amounts, writing, reading, remains)]
    load().diptych_state_spaces(ctypes.byref(where), *given, len(slots))


def _recurrence(kept: Tensor, heads_a_group: int, starts: Tensor, slots: Tensor, out: Tensor) -> _Recurrence:
    assert starts.dtype == slots.dtype == torch.int64, (starts.dtype, slots.dtype)
    assert len(starts) == len(slots) + 1, (starts.shape, slots.shape)
    places = *slots_of(kept), starts.data_ptr(), slots.data_ptr(), address(out)
    return _Recurrence(*kept.shape[1:], heads_a_group, *places)
