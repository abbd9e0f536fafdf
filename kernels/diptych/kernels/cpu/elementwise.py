"""Norm and activation in one pass each. Two-dimensional, dense, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) * weight` for each row."""
    out = torch.empty_like(x)
    load().diptych_add_rms_norm(address(x), None, address(weight), eps, *x.shape, out.data_ptr())
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `x` in place, then `rms_norm`."""
    assert x.shape == delta.shape, (x.shape, delta.shape)
    out = torch.empty_like(x)
    load().diptych_add_rms_norm(address(x), address(delta), address(weight), eps, *x.shape, out.data_ptr())
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`[num_rows, 2 * width]`, gates first -> `silu(gate) * up`, `[num_rows, width]`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width)
    load().diptych_silu_and_mul(address(gate_up), num_rows, width, out.data_ptr())
    return out
