"""The gated activations of feed-forward networks, one pass over memory.

Rule: results are rounded where `TorchOps` of `diptych.engine.models.arithmetic.ops` rounds them: with SiLU and GELU the
activated gate before it is multiplied, with the clamped SwiGLU only the product.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv

Activation: TypeAlias = Literal["silu", "gelu_tanh"]

TILE_NUMBERS: Final = 1024  # of gate and of up: 16 bytes a thread and load
GELU_SCALE: Final = tl.constexpr((8 / 3.141592653589793) ** 0.5)  # twice the sqrt(2 / pi) of the tanh form
GELU_CUBIC: Final = tl.constexpr(0.044715)


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """`[num_tokens, 2 * ffn_size]`, gates first -> `[num_tokens, ffn_size]`, both contiguous and of one type."""
    _launch(gate_up, out, "silu")


def gelu_tanh_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """The same with GELU in its tanh form."""
    _launch(gate_up, out, "gelu_tanh")


def clamped_swiglu(gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
    """The same with `(up + 1) * gate * sigmoid(alpha * gate)`: gates up to `limit`, ups within it on both sides."""
    _launch(gate_up, out, "clamped_swiglu", alpha, limit)


def mul_sigmoid(x: Tensor, gates: Tensor) -> None:
    """Multiply `x` by the sigmoid of `gates`, both contiguous and of one shape and type, in place."""
    assert (x.shape, x.dtype) == (gates.shape, gates.dtype), (x.shape, gates.shape, x.dtype, gates.dtype)
    assert x.is_contiguous(), x.stride()
    assert gates.is_contiguous(), gates.stride()
    if len(x):
        with torch.cuda.device_of(x):
            mul_sigmoid_kernel[(cdiv(x.numel(), TILE_NUMBERS),)](x, gates, x.numel(), TILE=TILE_NUMBERS)


def _launch(
    gate_up: Tensor,
    out: Tensor,
    activation: Activation | Literal["clamped_swiglu"],
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    num_tokens, size = out.shape
    assert gate_up.shape == (num_tokens, 2 * size), (gate_up.shape, out.shape)
    assert gate_up.dtype == out.dtype, (gate_up.dtype, out.dtype)
    assert gate_up.is_contiguous(), gate_up.stride()
    assert out.is_contiguous(), out.stride()
    with torch.cuda.device_of(out):
        grid = (num_tokens, cdiv(size, TILE_NUMBERS))
        constants = {"SIZE": size, "TILE": TILE_NUMBERS, "ACTIVATION": activation, "ALPHA": alpha, "LIMIT": limit}
        activate_kernel[grid](gate_up, out, **constants)


@triton.jit
def activate_kernel(
    gate_up,
    out,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr = 0.0,
    LIMIT: tl.constexpr = 0.0,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    gates = gate_up + row * (2 * SIZE) + column
    gate = tl.load(gates, mask=inside, other=0.0)
    up = tl.load(gates + SIZE, mask=inside, other=0.0)
    activated = clamped(gate, up, ALPHA, LIMIT) if ACTIVATION == "clamped_swiglu" else gated(gate, up, ACTIVATION)
    tl.store(out + row * SIZE + column, activated, mask=inside)


@triton.jit
def clamped(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return gpt-oss's activation of gates and ups, in their dtype."""
    limited = tl.minimum(gate.to(tl.float32), LIMIT)
    beside = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT) + 1.0
    return (limited / (1.0 + tl.exp(-ALPHA * limited)) * beside).to(gate.dtype)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return the product of each activated gate with its up, in their dtype."""
    dtype: tl.constexpr = gate.dtype
    gate = gate.to(tl.float32)
    doubled = (gate + gate * gate * gate * GELU_CUBIC) * GELU_SCALE
    exponent = gate if ACTIVATION == "silu" else doubled  # (1 + tanh(y)) / 2 is the sigmoid of 2y
    activated = (gate / (1.0 + tl.exp(-exponent))).to(dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(dtype)


@triton.jit
def mul_sigmoid_kernel(x, gates, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    values, gate = tl.load(x + at, mask=inside, other=0.0), tl.load(gates + at, mask=inside, other=0.0)
    shares = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(values.dtype)  # rounded as in `TorchOps`
    tl.store(x + at, (values.to(tl.float32) * shares.to(tl.float32)).to(values.dtype), mask=inside)
