"""What adapters are to a matrix, whatever computes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Product = tuple[Tensor, Tensor, int]  # a [rank, num_columns], b [num_rows, rank], first column of the result


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix that adapters change, by parts: an adapter has a product for each, or for none."""

    num_columns: int
    parts: tuple[tuple[int, int], ...]  # first row and rows of each, ascending
    is_embedding: bool = False  # its columns are picked, and A is kept transposed

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def num_rows(self) -> int:
        return sum(self.parts[-1])
