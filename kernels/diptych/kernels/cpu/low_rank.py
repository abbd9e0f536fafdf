"""What a low-rank adapter adds to a matrix product, for some tokens of a batch. See low_rank.h."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load
from diptych.kernels.cpu.linear import PackedMatrix


class PackedLowRank:
    """`a` [rank, num_columns] and `b` [num_rows, rank], float32, for the columns of `out` that begin at `start`."""

    def __init__(self, a: Tensor, b: Tensor, start: int) -> None:
        assert a.shape[0] == b.shape[1], (a.shape, b.shape)
        self._library = load()
        self._a, self._b = a, PackedMatrix(b)
        self._start = start

    def add(self, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        """`out[tokens, start : start + num_rows] += (x[tokens] @ a.T) @ b.T`; `tokens` int64, each once."""
        rank, num_columns = self._a.shape
        assert x.shape[1] == num_columns, (x.shape, num_columns)
        assert len(out) == len(x), (out.shape, x.shape)
        assert self._start + self._b.num_rows <= out.shape[1], (out.shape, self._start, self._b.num_rows)
        assert tokens.dtype == torch.int64, tokens.dtype
        inner = torch.empty(len(tokens), rank)
        self._library.diptych_add_low_rank(
            *(address(x), address(self._a), self._b.address, tokens.data_ptr()),
            *(address(out) + 4 * self._start, address(inner)),
            *(len(tokens), num_columns, rank, self._b.num_rows, out.shape[1]),
        )
