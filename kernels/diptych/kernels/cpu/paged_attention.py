"""Attention of one layer over the paged KV pool: rotate, store, attend in one call; see the headers beside it."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load

MAX_HEAD_DIM = 1024  # as in paged_kv.h
KV_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}  # as in paged_kv.h
UNBOUNDED = 1 << 40  # a window that no text fills


@dataclass(frozen=True, slots=True)
class Heads:
    """How queries share keys and values: head h reads KV head `h // (num_heads // num_kv_heads)`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None = None  # values are so many first dimensions of the keys; None: they are kept beside them

    @property
    def num_planes(self) -> int:
        return 2 if self.latent_dim is None else 1

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def num_states(self) -> int:
        """How many a token has: queries, keys, values."""
        return self.num_heads + self.num_planes * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tokens:
    """The new tokens of a step. A request's tokens lie together and have consecutive positions."""

    positions: npt.NDArray[np.int64]  # [num_tokens]
    out_slots: npt.NDArray[np.int64]  # [num_tokens]: page * page_size + offset
    extend_lens: npt.NDArray[np.int64]  # [batch_size]
    page_table: npt.NDArray[np.int32]  # [batch_size, max_pages]
    # [num_tokens]: behind the last key that each sees, never falling within a request; None: itself is the last
    seen_ends: npt.NDArray[np.int64] | None = None


class _Layer(ctypes.Structure):
    """`struct attention_layer`."""

    _fields_ = (
        ("rope", c_void_p),
        ("index", c_int64),
        ("rope_start", c_int64),
        ("rope_dim", c_int64),
        ("window", c_int64),
        ("chunked", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("keeps", c_int64),
    )


class AttentionLayer:
    """How the layer `index` attends, in every step.

    `rope`: `[context_len, 2, rope_dim / 2]`, cosines and sines of `rope_dim` dimensions of a head from `rope_start` on.
    `window`: tokens that a token sees, the newest, itself included; 0: all. `chunked`: it sees its own chunk of so many
    tokens instead, up to itself. `softcap` 0: none.
    `sinks`, `[num_heads]`: a score of each head that takes part in its softmax and has no value; may be filled later.
    `keeps` False: it stores nothing, and attends to what another layer of `index` has stored. Unless a
    row has more than states, it is given queries alone.
    """

    def __init__(
        self,
        index: int,
        rope: Tensor,
        *,
        scale: float,
        rope_start: int = 0,
        window: int = 0,
        chunked: bool = False,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        keeps: bool = True,
    ) -> None:
        self.index, self.rope, self.rope_end = index, rope, rope_start + 2 * rope.shape[2]
        self.sinks, self.keeps = sinks, keeps
        rotation = address(rope), index, rope_start, 2 * rope.shape[2]
        place = None if sinks is None else address(sinks)
        self._layer = _Layer(*rotation, window or UNBOUNDED, chunked, scale, softcap, place, keeps)
        self.pointer = ctypes.byref(self._layer)


class _Step(ctypes.Structure):
    """`struct attention_step`."""

    _fields_ = (
        ("kv", c_void_p),
        ("positions", c_void_p),
        ("out_slots", c_void_p),
        ("first_tokens", c_void_p),
        ("page_table", c_void_p),
        ("table_width", c_int64),
        ("batch_size", c_int64),
        ("num_layers", c_int64),
        ("num_planes", c_int64),
        ("page_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("page_bytes", c_int64),
        ("num_states", c_int64),
        ("kv_type", c_int64),
        ("num_borrowing_states", c_int64),
        ("seen_ends", c_void_p),
    )


class PagedAttention:
    """One step over all layers of `kv[num_pages, num_layers, num_planes, page_size, num_kv_heads, head_dim]`.

    The pool is of any of KV_TYPES; other regions may lie between its pages. Positions and pages are trusted, not
    checked.
    """

    def __init__(self, heads: Heads, kv: Tensor, tokens: Tokens, row_size: int | None = None) -> None:
        """`row_size`: numbers of a token in `qkv`, of which its states are the first; None: there are no others.

        With a `row_size` layers that borrow have rows as the others, in which their keys mean nothing.
        """
        _check(heads, kv, tokens)
        self._library = load()
        first_tokens = np.concatenate(([0], np.cumsum(tokens.extend_lens)))
        arrays = (tokens.positions, tokens.out_slots, first_tokens, tokens.page_table)
        self._arrays = tuple(np.ascontiguousarray(array) for array in arrays)
        self._ends = None if tokens.seen_ends is None else np.ascontiguousarray(tokens.seen_ends)
        self._out_shape = len(tokens.positions), heads.num_heads * heads.value_dim
        self._qkv_width = row_size or heads.num_states * heads.head_dim
        self._borrowing_width = row_size or heads.num_heads * heads.head_dim
        self._step = _Step(
            kv.data_ptr(),
            *(array.ctypes.data for array in self._arrays),
            tokens.page_table.shape[1],
            len(tokens.extend_lens),
            *kv.shape[1:4],
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.value_dim,
            kv.stride(0) * kv.itemsize,
            self._qkv_width,
            KV_TYPES[kv.dtype],
            self._borrowing_width,
            None if self._ends is None else self._ends.ctypes.data,
        )
        self.pointer = ctypes.byref(self._step)

    def decode(self, qkv: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """One token a request, or a few: each is computed as it would be alone, to the bit.

        `qkv`: `[num_tokens, num_states * head_dim]`, or queries alone; `out`: `[num_tokens, num_heads * value_dim]`.
        """
        self.check_shapes(qkv, layer, out)
        self._library.diptych_decode_attention(self.pointer, layer.pointer, address(qkv), address(out))

    def extend(self, qkv: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """Any number of tokens a request, each attending to itself and to what its window holds before it."""
        self.check_shapes(qkv, layer, out)
        if self._library.diptych_extend_attention(self.pointer, layer.pointer, address(qkv), address(out)):
            raise MemoryError("extend attention")

    def check_shapes(self, qkv: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """See that they are those of the step: the kernels trust them."""
        assert layer.rope_end <= self._step.head_dim, layer.rope.shape
        assert layer.sinks is None or layer.sinks.shape == (self._step.num_heads,), layer.sinks
        width = self._qkv_width if layer.keeps else self._borrowing_width
        assert qkv.shape == (self._out_shape[0], width), qkv.shape
        assert out.shape == self._out_shape, out.shape


def _check(heads: Heads, kv: Tensor, tokens: Tokens) -> None:
    assert kv.shape[2] == heads.num_planes, kv.shape
    assert heads.value_dim <= heads.head_dim, heads
    assert kv.shape[4:] == (heads.num_kv_heads, heads.head_dim), kv.shape
    assert kv.dtype in KV_TYPES, kv.dtype
    assert kv[0].is_contiguous(), kv.stride()
    assert heads.head_dim <= MAX_HEAD_DIM, heads.head_dim
    dtypes = [array.dtype for array in (tokens.positions, tokens.out_slots, tokens.extend_lens)]
    assert dtypes == [np.int64] * 3, dtypes
    assert tokens.page_table.dtype == np.int32, tokens.page_table.dtype
    if tokens.seen_ends is not None:
        assert tokens.seen_ends.dtype == np.int64, tokens.seen_ends.dtype
        assert tokens.seen_ends.shape == tokens.positions.shape, tokens.seen_ends.shape
