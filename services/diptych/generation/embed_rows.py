"""Rows of numbers that a client gives in place of the embeddings of tokens, and the names that they go by.

Rule: a row's name follows from all rows up to it. So prompts that begin with the same rows have the same names there,
and what a cache keeps of the beginning is found by both, wherever they part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import F32, I64
from diptych.common.errors import InvalidRequest

NAME_BYTES: Final = 8
NUMBER_BYTES: Final = 4
_BELOW_ZERO: Final = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class EmbedRows:
    """Rows as a model's layers are to see them."""

    width: int  # numbers of each
    names: bytes = field(repr=False)  # of each row the first 8 bytes of the SHA-256 of all rows up to it
    data: bytes = field(default=b"", repr=False)  # float32 [num_rows, width], little-endian; empty where none is read

    @property
    def keys(self) -> I64:
        """Return what stands at each place of the prompt, below zero: see `segments`."""
        words = np.frombuffer(self.names, "<u8") | _BELOW_ZERO
        return words.view(np.int64)

    @property
    def largest(self) -> float:
        """Return how far from zero a number is at most; NaN if one is none, 0 if there are no numbers."""
        values = np.frombuffer(self.data, "<f4")
        return float(max(values.max(), -values.min())) if len(values) else 0.0

    def span(self, first: int, end: int) -> F32:
        """Return the numbers of the rows `[first, end)`."""
        count = (end - first) * self.width
        found: F32 = np.frombuffer(self.data, "<f4", count, first * self.width * NUMBER_BYTES)
        return found.reshape(-1, self.width)

    def check(self, num_rows: int) -> None:
        """Raise `InvalidRequest` unless there are a name for each of so many rows, and all of their numbers or none."""
        if len(self.names) != NAME_BYTES * num_rows:
            words = f"{num_rows} rows have {NAME_BYTES * num_rows} bytes of names, not {len(self.names)}"
            raise InvalidRequest(words, param="contents")
        if len(self.data) not in (0, NUMBER_BYTES * self.width * num_rows):
            words = f"{num_rows} rows of {self.width} numbers have {NUMBER_BYTES} bytes each, not {len(self.data)}"
            raise InvalidRequest(f"{words} together", param="contents")


def rows_of(numbers: Sequence[Sequence[float]]) -> F32:
    """Return rows of numbers as an array `[num_rows, width]`, of which there is at least one.

    Raises `InvalidRequest` unless all are as wide as the first. What no float32 holds is infinite: see `check_finite`.
    """
    width = len(numbers[0])
    for index, row in enumerate(numbers):
        if len(row) != width:
            words = f"row {index} of input_embeds has {len(row)} numbers, and the first has {width}: make them alike"
            raise InvalidRequest(words, param="input_embeds")
    with np.errstate(over="ignore"):
        return np.array(numbers, np.float64).astype(np.float32)


def check_row_bytes(data: bytes, width: int) -> None:
    """Raise `InvalidRequest` unless these are rows of so many float32, at least one. What they are is not looked at."""
    if not width:
        words = "the width of input_embeds is 0: give the numbers of a row, which are the model's hidden size"
        raise InvalidRequest(words, param="input_embeds")
    if not data or len(data) % (NUMBER_BYTES * width):
        words = f"input_embeds has {len(data)} bytes: rows of {width} float32 take {NUMBER_BYTES * width} bytes each"
        raise InvalidRequest(f"{words}, and there is at least one", param="input_embeds")


def check_shape(numbers: npt.NDArray[Any]) -> None:
    """Raise `InvalidRequest` unless these are floats in rows, at least one. What they are is not looked at."""
    if numbers.ndim != 2 or not numbers.size or not np.issubdtype(numbers.dtype, np.floating):
        shape = list(numbers.shape)
        words = f"input_embeds is an array of {numbers.dtype} of shape {shape}: give floats, [num_rows, hidden_size]"
        raise InvalidRequest(words, param="input_embeds")


def checked_rows(numbers: npt.NDArray[np.floating]) -> F32:
    """Return the same as float32. Raises `InvalidRequest` unless they are finite rows, at least one."""
    check_shape(numbers)
    with np.errstate(over="ignore"):
        found = numbers.astype(np.float32)
    check_finite(found)
    return found


def check_finite(numbers: F32) -> None:
    """Raise `InvalidRequest` unless all numbers are finite."""
    if not np.isfinite(numbers).all():
        words = "input_embeds has a number that no float32 holds: give finite ones, below 3.4e38"
        raise InvalidRequest(words, param="input_embeds")


def to_bytes(rows: F32) -> bytes:
    """Return rows as `EmbedRows.data` has them."""
    return np.ascontiguousarray(rows, "<f4").tobytes()


def named(data: bytes, width: int) -> tuple[EmbedRows, bytes]:
    """Return rows with their names, and the digest of them all. The data is taken as it is: see `EmbedRows`."""
    so_far = hashlib.sha256(b"rows of float32\0" + width.to_bytes(8, "little"))
    names = bytearray()
    rows: F32 = np.frombuffer(data, "<f4").reshape(-1, width)
    for row in rows:
        so_far.update(row)
        names += so_far.digest()[:NAME_BYTES]
    return EmbedRows(width, bytes(names), data), so_far.digest()
