"""The gated activations of feed-forward networks, one pass over memory.

Rule: the activated gate is rounded before it is multiplied, as `TorchOps` of `diptych.engine.models.ops` does it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv

TILE_NUMBERS: Final = 1024  # of gate and of up: 16 bytes a thread and load
GELU_SCALE: Final = tl.constexpr((8 / 3.141592653589793) ** 0.5)  # twice the sqrt(2 / pi) of the tanh form
GELU_CUBIC: Final = tl.constexpr(0.044715)


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """`[num_tokens, 2 * ffn_size]`, gates first -> `[num_tokens, ffn_size]`, both contiguous and of one type."""
    _launch(silu_and_mul_kernel, gate_up, out)


def gelu_tanh_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """The same with GELU in its tanh form."""
    _launch(gelu_tanh_and_mul_kernel, gate_up, out)


def _launch(kernel: Any, gate_up: Tensor, out: Tensor) -> None:
    num_tokens, size = out.shape
    assert gate_up.shape == (num_tokens, 2 * size), (gate_up.shape, out.shape)
    assert gate_up.dtype == out.dtype, (gate_up.dtype, out.dtype)
    assert gate_up.is_contiguous(), gate_up.stride()
    assert out.is_contiguous(), out.stride()
    with torch.cuda.device_of(out):
        kernel[(num_tokens, cdiv(size, TILE_NUMBERS))](gate_up, out, SIZE=size, TILE=TILE_NUMBERS)


@triton.jit
def silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    gate, up, place, inside = _read(gate_up, out, SIZE, TILE)
    activated = gate / (1.0 + tl.exp(-gate))
    tl.store(place, _product(activated, up, place), mask=inside)


@triton.jit
def gelu_tanh_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    gate, up, place, inside = _read(gate_up, out, SIZE, TILE)
    doubled = (gate + gate * gate * gate * GELU_CUBIC) * GELU_SCALE
    activated = gate / (1.0 + tl.exp(-doubled))  # (1 + tanh(y)) / 2 is the sigmoid of 2y
    tl.store(place, _product(activated, up, place), mask=inside)


@triton.jit
def _read(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return gates, ups, where the result belongs, and which are there."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    gates = gate_up + row * (2 * SIZE) + column
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=inside, other=0.0).to(tl.float32)
    return gate, up, out + row * SIZE + column, inside


@triton.jit
def _product(activated, up, place):
    dtype: tl.constexpr = place.dtype.scalar.element_ty
    return (activated.to(dtype).to(tl.float32) * up).to(dtype)
