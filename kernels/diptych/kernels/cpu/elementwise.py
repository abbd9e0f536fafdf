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


def gelu_tanh_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """`[num_rows, 2 * width]`, gates first -> `gelu(gate) * up`, by its tanh formula."""
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width), (gate_up.shape, out.shape)
    load().diptych_gelu_tanh_and_mul(address(gate_up), num_rows, width, address(out))


def clamped_swiglu(gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
    """`[num_rows, 2 * width]`, gates first -> `(up + 1) * gate * sigmoid(alpha * gate)`.

    Gates are clamped to `limit`, ups to it on both sides.
    """
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width), (gate_up.shape, out.shape)
    load().diptych_clamped_swiglu(address(gate_up), num_rows, width, alpha, limit, address(out))


def norm_heads(qkv: Tensor, num_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """`rms_norm` of each query and key head of `[num_rows, (num_heads + 2 * num_kv_heads) * head_dim]`, in place."""
    (dim,) = q_weight.shape
    num_kv_heads, rest = divmod(qkv.shape[1] // dim - num_heads, 2)
    assert (rest, k_weight.shape, qkv.shape[1] % dim) == (0, q_weight.shape, 0), (qkv.shape, num_heads, dim)
    weights = address(q_weight), address(k_weight)
    load().diptych_norm_heads(address(qkv), *weights, eps, len(qkv), num_heads, num_kv_heads, dim)


def mul_sigmoid(x: Tensor, gates: Tensor) -> None:
    """Multiply `x` by the sigmoid of `gates`, of its shape, in place."""
    assert x.shape == gates.shape, (x.shape, gates.shape)
    load().diptych_mul_sigmoid(address(x), address(gates), *x.shape)
