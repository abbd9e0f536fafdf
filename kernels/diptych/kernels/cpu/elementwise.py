"""Norm and activation in one pass each. Two-dimensional, dense, float32; results go to buffers of the caller."""

from __future__ import annotations

from torch import Tensor

from diptych.kernels.cpu.library import address, load


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`out = x / rms(x) * weight` for each row."""
    assert x.shape == out.shape, (x.shape, out.shape)
    load().diptych_add_rms_norm(address(x), None, address(weight), eps, *x.shape, address(out))


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Add `delta` to `x` in place, then `rms_norm`."""
    assert x.shape == delta.shape == out.shape, (x.shape, delta.shape, out.shape)
    load().diptych_add_rms_norm(address(x), address(delta), address(weight), eps, *x.shape, address(out))


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """`[num_rows, 2 * width]`, gates first -> `silu(gate) * up`, `[num_rows, width]`."""
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width), (gate_up.shape, out.shape)
    load().diptych_silu_and_mul(address(gate_up), num_rows, width, address(out))
