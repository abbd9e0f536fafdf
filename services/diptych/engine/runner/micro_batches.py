"""What a runner computes of a round in which a scheduler has two micro-batches."""

from __future__ import annotations

from typing import Final

from diptych.engine.models.expert_ranks import ExpertRanks
from diptych.engine.schedule.micro_batches import halves
from diptych.engine.values.batch import ForwardBatch

Parts = tuple[ForwardBatch | None, ForwardBatch | None]  # None: we have no token in this half
NOBODYS: Final = (None, None)


def halves_of_round(sharing: ExpertRanks | None, batch: ForwardBatch | None) -> Parts | None:
    """Return what we compute in each half of the running round; None: nobody has halves.

    `batch` is our step; None: we have none. Where others have halves and we don't, it is our first one.
    """
    if sharing is None or (num_late := sharing.late_tokens) is None:
        return None
    return halves(batch, num_late) if batch is not None and num_late else (batch, None)
