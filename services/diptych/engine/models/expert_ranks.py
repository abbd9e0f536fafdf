"""The ranks that share experts though each has tokens of its own, as layers see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from diptych.engine.values.expert_placement import ExpertPlacement
from diptych.engine.values.rounds import Round


class ExpertRanks(Protocol):
    """Collectives over all ranks of all schedulers that share experts. Every rank makes the same calls in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def round(self) -> Round | None:
        """The sizes of the running step; None: all ranks run the same one, as before they serve."""
        ...

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        """Return which experts of a layer each rank has."""
        ...

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        """Return which ones this rank has, in the order of their places."""
        ...

    def count(self, layer: int, chosen: Tensor) -> None:
        """Hear which experts of a layer tokens have chosen: int64, of any shape."""
        ...

    def smallest(self, number: int) -> int:
        """Wait for all ranks; return the smallest of their numbers."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Put the rows of all ranks together: `[n, width]` -> `[size * n, width]`, n alike on all."""
        ...

    def num_sent_to_us(self, num_sent: Sequence[int]) -> list[int]:
        """Tell each rank how many rows it is sent; return how many each one sends to us. Waits for all."""
        ...

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send each rank its part of `rows`; return what all have sent to us, in order of rank."""
        ...
