"""Experts on GPUs: all of a layer are multiplied at once, in the format that their checkpoint has them in.

`FORMATS` says which formats have a grouped product. `GroupedExperts` computes the experts of a mixture in two of them:
nothing waits for the GPU, and a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.matrices.gpu_fp8 import has_fp8
from diptych.engine.models.matrices.matrix import Activate
from diptych.kernels.gpu.layers import int4_experts, mxfp4_experts
from diptych.kernels.gpu.layers.fp8_experts import Fp8Experts
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix, blocks_of, can_keep
from diptych.kernels.gpu.layers.int4_experts import Int4Experts, Int4Matrix
from diptych.kernels.gpu.layers.moe import VECTOR_NBYTES, AlignedExperts, align_experts, combine_experts
from diptych.kernels.gpu.layers.mxfp4_experts import Mxfp4Experts, Mxfp4Matrix
from diptych.kernels.quantized import Code, QuantizedArray


class GroupedWeights(Protocol):
    """One matrix `[n, k]` of each expert."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_experts(self) -> int: ...

    def block(self, num_assignments: int) -> int:
        """Return how many rows should be multiplied at once; more will do, too."""
        ...

    def multiply(
        self, x: Tensor, aligned: AlignedExperts, chosen: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """Multiply each assignment's row of `x`, which has a row for each token or each assignment, into `out`.

        `aligned` are the assignments `chosen`. `bias`, `[num_experts, n]`, is added.
        """
        ...


class Packed(Protocol):
    """A weight in few bits, as a grouped product takes it."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def group(self) -> int:
        """Columns of a scale; 0: all."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is packed, unpacked, and put together with those of other experts."""

    pack: Callable[[Sequence[QuantizedArray], torch.device], Packed | None]  # of arrays on top of each other
    unpack: Callable[[Any], Tensor]  # to float32
    grouped: Callable[[Sequence[Any]], GroupedWeights]  # of matrices of one shape and group


class PackedMatrix:
    """An expert's weight in few bits, to be multiplied with those of all experts: see `grouped`."""

    def __init__(self, packed: Packed, form: Format, dtype: torch.dtype) -> None:
        self.packed = packed
        self.form = form
        self._dtype = dtype  # of the states

    def multiply(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self.dense().T, out=out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.dense()[ids]

    def dense(self) -> Tensor:
        """Return it expanded, a new tensor."""
        return self.form.unpack(self.packed).to(self._dtype)


def packed(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> PackedMatrix | None:
    """Return an expert's weight as it is stored; None if it is in no format of `FORMATS`."""
    form = FORMATS.get(weight.parts[0].code)
    found = form.pack(weight.parts, device) if form else None
    return PackedMatrix(found, form, dtype) if form and found else None


def narrowed(weight: Tensor) -> PackedMatrix | None:
    """Quantise an expert's weight to FP8 with a scale a row; None if the grouped product could not read it."""
    if weight.shape[1] % VECTOR_NBYTES:
        return None
    return PackedMatrix(Fp8Matrix.made(weight), FORMATS["fp8"], weight.dtype)


def grouped(matrices: Sequence[PackedMatrix]) -> GroupedWeights | None:
    """Put the matrices of experts together; None if they are not all of one format."""
    if len({(id(matrix.form), matrix.packed.group) for matrix in matrices}) > 1:
        return None
    return matrices[0].form.grouped([matrix.packed for matrix in matrices])


class GroupedExperts:
    """`Experts` whose weights stay where they are."""

    def __init__(
        self, gate_up: GroupedWeights, down: GroupedWeights, activate: Activate, bias: Tensor | None = None
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activate = activate
        self._bias = bias  # [num_experts, num_rows] of `gate_up`

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        if not len(x):  # the last layer of a step that nobody samples from
            return
        sizes = self._gate_up.shape[0], self._down.shape[1]
        rows, num_experts = chosen.numel(), self._down.num_experts
        block = max(self._gate_up.block(rows), self._down.block(rows))
        aligned = align_experts(chosen, num_experts, block)
        gate_up, activated = (x.new_empty(rows, size) for size in sizes)
        results = x.new_empty(rows, x.shape[1])
        self._gate_up.multiply(x, aligned, chosen, gate_up, self._bias)
        self._activate(gate_up, activated)
        self._down.multiply(activated, aligned, chosen, results)
        combine_experts(results, chosen, shares, out)


def _mxfp4(arrays: Sequence[QuantizedArray], device: torch.device) -> Mxfp4Matrix | None:
    if len(arrays) > 1 or not mxfp4_experts.can_keep(arrays[0]):
        return None
    return Mxfp4Matrix.of(arrays[0], device)


def _fp8(arrays: Sequence[QuantizedArray], device: torch.device) -> Fp8Matrix | None:
    first = arrays[0]
    if len(arrays) > 1 or not can_keep(first) or not has_fp8(device) or first.shape[1] % VECTOR_NBYTES:
        return None
    return Fp8Matrix.of(first, device) if len(blocks_of(first)) == 1 else None


def _int4(arrays: Sequence[QuantizedArray], device: torch.device) -> Int4Matrix | None:
    return Int4Matrix.of(arrays, device) if int4_experts.group_of(arrays) else None


FORMATS: Final[Mapping[Code, Format]] = {
    "fp4": Format(_mxfp4, mxfp4_experts.unpack, Mxfp4Experts.of),
    "fp8": Format(_fp8, Fp8Matrix.dequantize, Fp8Experts.of),
    "int4": Format(_int4, int4_experts.unpack, Int4Experts.of),
}
