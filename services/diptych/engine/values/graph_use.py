"""What a scheduler tells of its captured steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Steps that were captured as CUDA graphs."""

    num_graphs: int  # sizes: batch sizes of decode steps, and numbers of tokens of small steps with prompts
    nbytes: int  # of the device's memory, taken when they were captured


NO_GRAPHS: Final = GraphUse(0, 0)
