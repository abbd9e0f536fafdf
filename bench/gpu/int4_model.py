"""A made-up model whose layers have weights in four bits, in groups of 128, as AWQ and GPTQ store them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ModelSource
from diptych.kernels.quantized import Array, QuantizedArray
from diptych.tokens.tokenizer import Tokenizer

GROUP: Final = 128
SCALE: Final = 0.02 / 4.6  # codes from -8 to 7 have a deviation of 4.6


class Int4Model:
    """A `ModelSource` over another one: matrices of its layers have random codes. Those of a shape are one array."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.config = source.config
        self.weights_id = source.weights_id
        self.weight_files = source.weight_files
        self._made = dict[tuple[int, ...], QuantizedArray]()

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def next_layer(self) -> ModelSource:
        return self._source.next_layer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, tensor in self._source.tensors():
            is_layer = ".layers." in name and isinstance(tensor, np.ndarray) and tensor.ndim == 2
            yield name, self._of(tensor.shape) if is_layer else tensor

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        return apart

    def _of(self, shape: tuple[int, ...]) -> QuantizedArray:
        if shape not in self._made:
            self._made[shape] = random_int4(*shape)
        return self._made[shape]


def random_int4(num_rows: int, num_columns: int, group: int = GROUP) -> QuantizedArray:
    """Return a weight of a usual size of numbers."""
    random = np.random.default_rng(num_columns)
    codes: Array = random.integers(-8, 8, (num_rows, num_columns), np.int8)
    scales = random.uniform(0.5, 1.5, (num_rows, num_columns // group)) * SCALE
    return QuantizedArray("int4", codes, scales.astype(np.float16), None, group)
