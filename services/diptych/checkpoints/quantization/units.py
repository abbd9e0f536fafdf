"""Which columns of a matrix ranks can't part: they share a scale, or a byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diptych.architectures.placement import Piece

Units = Callable[[str, "Piece"], int]  # how many neighbouring columns of a tensor's piece no ranks can part


def apart(name: str, piece: Piece) -> int:
    """`Units` of floats: each column may be another rank's."""
    return 1
