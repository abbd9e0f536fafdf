"""What a scheduler tells of its captured steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GraphUse:
    """CUDA graphs of decode steps, and the device memory that they took when they were captured."""

    num_graphs: int
    nbytes: int


NO_GRAPHS: Final = GraphUse(0, 0)
