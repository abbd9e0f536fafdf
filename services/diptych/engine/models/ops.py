"""The arithmetic of a transformer layer other than attention, as an interface, and its torch implementation.

A model is written once against `Ops`; what differs by processor is how weights are laid out and multiplied.
Results go to buffers of the caller: a step's layers share them, so memory is touched once, not once a layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Matrix(Protocol):
    """A weight `[num_rows, num_columns]` in the layout its processor likes."""

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`[num_tokens, num_columns]` -> `[num_tokens, num_rows]`."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Look up: `[num_ids]` -> `[num_ids, num_columns]`, a new tensor."""
        ...


class Ops(Protocol):
    """What a Llama layer computes. All tensors are contiguous, two-dimensional, of the model's dtype."""

    def matrix(self, weight: Tensor) -> Matrix:
        """Take over a weight `[num_rows, num_columns]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Add `delta` to `x` in place; `out` is the norm of the sum."""
        ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """`[num_tokens, 2 * ffn_size]`, gates first -> `[num_tokens, ffn_size]`."""
        ...


class TorchMatrix:
    """A weight as torch keeps it."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def multiply(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self._weight.T, out=out)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids]


class TorchOps:
    """Any dtype on any device."""

    def matrix(self, weight: Tensor) -> TorchMatrix:
        return TorchMatrix(weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        wide = x.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(weight, (wide * scale).to(x.dtype), out=out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.rms_norm(x.add_(delta), weight, eps, out)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)
