"""The stages of a pipeline, which have neighbouring layers each, as the layers of one see the others."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stages(Protocol):
    """Hidden states go from stage to stage, and logits back to the first. All run the same steps in one order."""

    @property
    def number(self) -> int:
        """Which stage this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill `x`, `[num_tokens, hidden_size]`, with what the stage before has sent. Not in the first stage."""
        ...

    def send(self, x: Tensor) -> None:
        """Send to the stage behind, and maybe return before `x` has left: it must not change. Not in the last stage."""
        ...

    def bring_back(self, logits: Tensor) -> None:
        """Fill `logits`, `[num_rows, vocab_size]`, of rank 0 with those of the last stage. In all stages."""
        ...
