"""A weight that tokens are multiplied by, as an interface, and as torch keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from diptych.checkpoints.quantization.weight import QuantizedWeight

Activate = Callable[[Tensor, Tensor], None]  # gates and ups -> activated
Weight = Tensor | QuantizedWeight  # of the model's dtype, or as the checkpoint stores it


class Matrix(Protocol):
    """A weight `[num_rows, num_columns]` in the layout its processor likes."""

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`[num_tokens, num_columns]` -> `[num_tokens, num_rows]`."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Look up: `[num_ids]` -> `[num_ids, num_columns]`, a new tensor."""
        ...


class HeadMatrices(Protocol):
    """A weight `[num_rows, num_columns]` for each head."""

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`[num_tokens, num_heads, num_columns]` -> `[num_tokens, num_heads, num_rows]`, of any strides."""
        ...


class TorchMatrix:
    """A weight as torch keeps it."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def multiply(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self._weight.T, out=out)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids]


class TorchHeadMatrices:
    """`HeadMatrices` as torch keeps them, all multiplied at once."""

    def __init__(self, weights: Tensor) -> None:
        self._transposed = weights.transpose(1, 2)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), self._transposed).transpose(0, 1))

    def spread(self, x: Tensor, out: Tensor) -> None:
        """Multiply all by the same: `[num_tokens, num_columns]` -> `[num_heads, num_tokens, num_rows]`, contiguous."""
        torch.bmm(x.expand(len(out), *x.shape), self._transposed, out=out)

    def spread_back(self, x: Tensor, out: Tensor) -> None:
        """The same by the transposed: `[num_tokens, num_rows]` -> `[num_heads, num_tokens, num_columns]`."""
        torch.bmm(x.expand(len(out), *x.shape), self._transposed.mT, out=out)


class HeadMatricesInTurn:
    """`HeadMatrices` of any matrices, one after the other."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices

    def multiply(self, x: Tensor, out: Tensor) -> None:
        result = out.new_empty(len(out), out.shape[2])
        for head, matrix in enumerate(self._matrices):
            matrix.multiply(x[:, head].contiguous(), result)
            out[:, head] = result
