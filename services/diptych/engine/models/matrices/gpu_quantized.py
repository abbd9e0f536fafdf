"""Weights that a GPU keeps as the checkpoint stores them, and multiplies without an expanded copy.

`FORMATS` says what has kernels. Parts of a matrix that are stored in different formats are multiplied one after the
other, each into its columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.matrices.dense import dense
from diptych.engine.models.matrices.gpu_fp8 import Fp8Kept, has_fp8
from diptych.engine.models.matrices.gpu_integers import GpuIntegers
from diptych.engine.models.matrices.matrix import Matrix
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix, blocks_of, can_keep
from diptych.kernels.quantized import Code, QuantizedArray

TWO_BYTES: Final = ("float16", "bfloat16")  # codes that are numbers


class KeptMatrix(Matrix, Protocol):
    """A weight `[n, k]` in few bits. Rows of `out` that `multiply` writes may be parts of longer ones."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self) -> Tensor:
        """Return it expanded to the states' dtype, a new tensor."""
        ...


class DensePart:
    """A part that is stored in 16 bits, beside others that are not."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        return self._weight.shape[0], self._weight.shape[1]

    def multiply(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self._weight.T, out=out)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids]

    def dense(self) -> Tensor:
        return self._weight.clone()


class StackedMatrix:
    """Matrices of equal width on top of each other, each in its own format."""

    def __init__(self, parts: Sequence[KeptMatrix]) -> None:
        self._parts = parts

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self._parts), self._parts[0].shape[1]

    def multiply(self, x: Tensor, out: Tensor) -> None:
        start = 0
        for part in self._parts:
            part.multiply(x, out[:, start : start + part.shape[0]])
            start += part.shape[0]

    def rows(self, ids: Tensor) -> Tensor:
        return self.dense()[ids]

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self._parts])


def keep_fp8(array: QuantizedArray, dtype: torch.dtype, device: torch.device) -> KeptMatrix | None:
    """Keep FP8 with a scale a row, or a block of 128 x 128."""
    if not can_keep(array) or not has_fp8(device):
        return None
    blocks = [Fp8Kept(Fp8Matrix.of(each, device), dtype) for each in blocks_of(array)]
    return blocks[0] if len(blocks) == 1 else StackedMatrix(blocks)


Keep = Callable[[QuantizedArray, torch.dtype, torch.device], KeptMatrix | None]
FORMATS: Final[Mapping[Code, Keep]] = {  # None: not such an array
    "fp8": keep_fp8,
    "int4": GpuIntegers.of,
    "int8": GpuIntegers.of,
}


def kept(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> KeptMatrix | None:
    """Return `weight` as it is stored, to be multiplied with states of `dtype`; None if a part has no kernel."""
    if all(part.code in TWO_BYTES for part in weight.parts):
        return None
    parts = [_part(part, dtype, device) for part in weight.parts]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return found[0] if len(found) == 1 else StackedMatrix(found)


def _part(array: QuantizedArray, dtype: torch.dtype, device: torch.device) -> KeptMatrix | None:
    if array.code in TWO_BYTES:
        return DensePart(dense([array], dtype, device))
    keep = FORMATS.get(array.code)
    return keep(array, dtype, device) if keep else None
