"""Tokens on their way through the layers of a decoder: those of a step, or of one of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.axial_rope import Turns
from diptych.engine.models.layer import Layer
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import Stream
from diptych.engine.models.layers.recurrent.trials import LayerStates
from diptych.engine.values.batch import OnLayer


class Rows(Protocol):
    """Hidden rows of tokens, for a model that joins them to embeddings."""

    @property
    def table(self) -> Tensor:
        """`[num_places, hidden_size]`. No row is the row of a token that is the first of its request."""
        ...

    def of_step(self, num_tokens: int) -> Tensor:
        """Return where those of a step's tokens are written, `[num_tokens, hidden_size]`."""
        ...

    def tap(self, place: int, x: Tensor) -> None:
        """Take `[num_tokens, hidden_size]` that come out of a layer; `place`: of it among those that are tapped."""
        ...

    def reduce(self, num_tokens: int) -> None:
        """Make the rows of a step's tokens of what was tapped."""
        ...


@dataclass(slots=True, eq=False)
class Passage:
    """What there is of them, and what was computed so far."""

    layers: Sequence[Layer]
    batch: StagedBatch
    attention: PhasedAttention  # that was told of the batch
    buffers: Sequence[Buffers]  # of each layer, in the same memory
    held: Sequence[Buffers]  # the same of the tokens alone, without those that fill a step up
    turns: Turns | None
    is_last_anywhere: bool  # whether ranks that share our experts compute the last layer
    on_layer: OnLayer | None = None
    states: LayerStates | None = None
    rows: Rows | None = None
    stream: Stream = field(init=False)
    logits: Tensor = field(init=False)
