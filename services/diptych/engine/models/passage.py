"""Tokens on their way through the layers of a decoder: those of a step, or of one of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.axial_rope import Turns
from diptych.engine.models.expert_ranks import ExpertRanks
from diptych.engine.models.layer import Layer
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import Stream
from diptych.engine.models.layers.recurrent.trials import LayerStates
from diptych.engine.models.operations import Operation, in_turn
from diptych.engine.values.batch import OnLayer
from diptych.engine.values.rounds import Round


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

    def place_rows(self, x: Tensor) -> None:
        """Write the rows that stand in place of tokens: of images, and those that clients gave."""
        batch = self.batch
        if batch.image_tokens is not None and batch.image_rows is not None:
            x[batch.image_tokens] = batch.image_rows[0]
        if batch.embed_tokens is not None and batch.embed_rows is not None:
            x[batch.embed_tokens] = batch.embed_rows

    def attend(self, index: int, place: int) -> None:
        """Have a layer attend; `place`: of it among those that do."""
        layer, buffers, batch = self.layers[index], self.held[index], self.batch
        if layer.growth is not None:
            layer.growth.apply(buffers.qkv, batch.positions)  # to rotate them before or afterwards is the same
        if batch.watcher is not None:
            batch.watcher.before(index, buffers.qkv)
        if layer.made is not None:
            self.attention.attend_decompressed(buffers.qkv, place, layer.made.attended(buffers), layer.made)
        else:
            self.attention.attend(buffers.qkv, place, buffers.attended)
        if batch.watcher is not None:
            batch.watcher.behind(index)


def halves_of(experts: ExpertRanks | None) -> tuple[Round, Round]:
    """Return the halves of the running round, which has some."""
    assert experts is not None, "without ranks that share experts nothing is on its way"
    assert experts.round is not None, "before the first round there is no step to share"
    halves = experts.round.halves
    assert halves is not None, "nobody has two micro-batches"
    return halves


def run_in_turn(lists: Sequence[Iterable[Operation]], experts: ExpertRanks | None, rounds: Sequence[Round]) -> None:
    """Run a list for each of `rounds`, which is the running one meanwhile."""
    assert experts is not None, "rounds are of ranks that share experts"
    whole = experts.round
    for number, operation in in_turn(lists):
        experts.round = rounds[number]
        operation()
    experts.round = whole
