"""In which steps hidden states are scattered over the ranks: by their bytes alone, so all ranks say the same. Pure.

A reduce-scatter and an all-gather move the bytes of an all-reduce, and each rank norms its part of the rows: what that
saves grows with the rows, what a second collective costs does not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SumRule:
    """When sums take which form."""

    num_ranks: int
    scattered_from_nbytes: int | None  # of a step's hidden states; None: never

    def scatters(self, num_tokens: int, row_nbytes: int) -> bool:
        """Return whether a step of so many tokens is scattered; none of fewer rows than there are ranks."""
        if self.scattered_from_nbytes is None or num_tokens < self.num_ranks:
            return False
        return num_tokens * row_nbytes >= self.scattered_from_nbytes


def sum_rule(device: str, num_ranks: int) -> SumRule:
    """Return the rule of a group.

    On CPUs never: gloo has no reduce-scatter. On GPUs never either, until `bench/gpu/collectives.py` says from where.
    """
    return SumRule(num_ranks, None)
