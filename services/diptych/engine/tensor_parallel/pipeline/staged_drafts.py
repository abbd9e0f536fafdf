"""Guesses of a model with layers where a pipeline has stages: the last one makes them, and rank 0 has them.

What guesses reads what comes out of the last layer, or text alone, and keeps its keys and values in the last stage's
part of each page. Every rank is asked by the log, in one order with steps, so what comes back is what was asked for.
"""

from __future__ import annotations

import numpy as np
import torch

from diptych.common.arrays import I64
from diptych.engine.models.stages import Stages
from diptych.engine.values.batch import NO_TOKEN, DraftBatch, DraftModel

_ROW_NUMBER_NBYTES = torch.bfloat16.itemsize


class StagedDraftModel:
    """Implements `DraftModel` for a rank of any stage; on rank 0 it returns what the last stage has found."""

    def __init__(self, own: DraftModel | None, stages: Stages, hidden_size: int) -> None:
        """`own`: that of the last stage's ranks; None in the others."""
        self._own = own
        self._stages = stages
        self._row_nbytes = hidden_size * _ROW_NUMBER_NBYTES

    def draft(self, batch: DraftBatch) -> I64:
        nothing = np.full((len(batch.token_ids), batch.most), NO_TOKEN, np.int64)
        found = torch.from_numpy(nothing if self._own is None else self._own.draft(batch))
        self._stages.bring_back(found)
        tokens: I64 = found.numpy()
        return tokens

    def row(self, slot: int) -> bytes:
        """A collective of all ranks, as `draft` is."""
        own = b"" if self._own is None else self._own.row(slot)
        message = torch.zeros(1 + self._row_nbytes, dtype=torch.uint8)
        if own:
            message[0] = 1
            message[1:] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._stages.bring_back(message)
        return message[1:].numpy().tobytes() if message[0] else b""

    def put_row(self, slot: int, row: bytes) -> None:
        if self._own is not None:
            self._own.put_row(slot, row)
