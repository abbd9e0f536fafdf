"""A step in pieces: attention, and what lies before, between and after the attention of the layers.

What attention launches depends on who is in the step; what the other pieces launch, on the number of tokens alone. So
whoever runs a step may record those once and replay them in every step of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from diptych.engine.models.layers import Buffers

T = TypeVar("T")


class Run(Protocol):
    """Runs the pieces of a step, which come in the same order in every step."""

    def __call__(self, piece: Callable[[], T]) -> T:
        """Run `piece`, or what was recorded of it; return its result."""
        ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a step's pieces are run, and where they leave what attention reads."""

    buffers: Buffers
    run: Run


def at_once(piece: Callable[[], T]) -> T:
    """Implements `Run` by nothing but a call."""
    return piece()
