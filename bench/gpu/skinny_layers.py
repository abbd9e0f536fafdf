"""The products of a decoder layer, with the norms and the activation between them, as a decode step queues them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.kernels.gpu.layers.activations import silu_and_mul
from diptych.kernels.gpu.layers.norms import add_rms_norm
from diptych.kernels.gpu.layers.skinny_gemm import pays_up_to, skinny_gemm

EPS: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights `[num_rows, num_columns]`."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


def run_of(layer: Layer, m: int, by: str) -> Callable[[], None]:
    """Return what queues a layer for `m` rows; what attention would give stays the same.

    `by`: "cuBLAS"; "ours": all products; "served": ours where they pay.
    """
    products = [_product(weight, m, by) for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    hidden, ffn = layer.down.shape
    sizes = (hidden, hidden, layer.o.shape[1], layer.qkv.shape[0], hidden, 2 * ffn, ffn)
    x, normed, attended, qkv, delta, gate_up, activated = (
        torch.randn(m, size, device="cuda").to(layer.o.dtype) for size in sizes
    )
    ones = torch.ones_like(x[0])

    def run() -> None:
        add_rms_norm(x, delta, ones, EPS, normed)
        products[0](normed, qkv)
        products[1](attended, delta)
        add_rms_norm(x, delta, ones, EPS, normed)
        products[2](normed, gate_up)
        silu_and_mul(gate_up, activated)
        products[3](activated, delta)

    return run


def _product(weight: Tensor, m: int, by: str) -> Callable[[Tensor, Tensor], object]:
    if by == "cuBLAS" or (by == "served" and m > pays_up_to(*weight.shape)):
        return lambda x, out: torch.mm(x, weight.T, out=out)
    return lambda x, out: skinny_gemm(x, weight, out)
