"""How GPUs keep a weight of integers in four or eight bits, see `gpu/layers/integer_matrix.py`. No torch, no Triton.

Rule: float16 scales stay so where a strip has at least two a row; with mins, in four bits only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from diptych.kernels.quantized import Code, QuantizedArray

BITS: Final = {"int4": 4, "int8": 8}
WORD_BITS: Final = 16
PART: Final = 32  # columns
SMALL_PART: Final = 16  # where a group is that small
MIDDLE: Final = 8  # of codes in four bits that have a sign: they are kept without


@dataclass(frozen=True, slots=True)
class IntegerLayout:
    """Where the numbers of a weight lie."""

    bits: int
    part: int  # columns
    group: int  # columns a scale; 0: all
    zero: int  # what codes are kept with on top
    is_half: bool  # two scales in float16 a word, rather than one in float32
    has_mins: bool

    @staticmethod
    def of(code: Code, group: int, *, has_half_scales: bool, has_mins: bool) -> IntegerLayout | None:
        """Return the layout; None if a part of a strip would have two scales a row."""
        if code not in BITS or group % SMALL_PART:
            return None
        part = SMALL_PART if group == SMALL_PART else PART
        strip = part * WORD_BITS // BITS[code]
        if group and strip % group and group % strip:
            return None
        is_half = has_half_scales and 0 < group < strip and not (has_mins and code == "int8")
        zero = MIDDLE if code == "int4" and not has_mins else 0
        return IntegerLayout(BITS[code], part, group, zero, is_half, has_mins)

    @property
    def strip(self) -> int:
        """Columns."""
        return self.part * WORD_BITS // self.bits

    @property
    def runs(self) -> int:
        """How many scales a strip has a row; 0: a scale is for several strips, or for the row."""
        return self.strip // self.group if self.group and self.group <= self.strip else 0

    @property
    def span(self) -> int:
        """How many strips have a scale; 0: all."""
        return max(1, self.group // self.strip) if self.group else 0

    def num_strips(self, num_columns: int) -> int:
        return -(-num_columns // self.strip)

    def num_factors(self, num_columns: int) -> int:
        """Return how many scales a row has, those of filled-up columns included."""
        num_strips = self.num_strips(num_columns)
        if self.runs:
            return num_strips * self.runs
        return -(-num_strips // self.span) if self.span else 1

    def nbytes(self, num_rows: int, num_columns: int) -> int:
        """Return what GPUs keep of a weight."""
        codes = self.num_strips(num_columns) * self.strip * self.bits // 8
        factor_nbytes = (2 if self.is_half else 4) * (2 if self.has_mins else 1)
        return num_rows * (codes + self.num_factors(num_columns) * factor_nbytes)

    def constants(self) -> dict[str, Any]:
        """Return what kernels are compiled with."""
        sizes = {"BITS": self.bits, "PART": self.part, "RUNS": self.runs, "SPAN": self.span}
        return sizes | {"ZERO": self.zero, "HALF": self.is_half, "HAS_MINS": self.has_mins}


def layout_of(array: QuantizedArray) -> IntegerLayout | None:
    """Return how GPUs keep `array`; None if they can't."""
    if array.scales is None:
        return None
    is_half = array.scales.dtype == np.float16
    return IntegerLayout.of(array.code, array.group, has_half_scales=is_half, has_mins=array.mins is not None)
