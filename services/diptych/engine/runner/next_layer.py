"""The layer that predicts one token more, on a CPU, as a draft model: it has the hidden rows of the model besides.

Rule: in a token's slot it keeps what it makes of that token and of the row before, not after it. So a page of it
depends on the same tokens as the model's own part, and is as good a prefix.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import stage
from diptych.engine.runner.draft_model import CpuDraftModel, behind, known
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.row_places import FIRST_OF_STEP, RowPlaces
from diptych.engine.values.batch import DraftBatch, ForwardBatch, OnLayer


class CpuNextLayer(CpuDraftModel):
    """Implements `DraftModel`. It follows every step, so it has missed nothing that was computed here."""

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        super().__init__(model, device)
        assert model.rows is not None
        self._rows = model.rows
        self.places = RowPlaces(model.rows.page_size)

    def _follow(self, batch: ForwardBatch, on_layer: OnLayer | None) -> None:
        joined = replace(batch, rows_before=self.places.begin(batch))
        staged = stage(known(joined, self._model), self._device)
        self._rows.keep(self.places.keep(batch))
        self._model.attention.init_forward_metadata(staged)
        of_nothing = replace(staged, logits_rows=staged.logits_rows[:0])
        self._model.forward(of_nothing, behind(on_layer, self._model))

    def row(self, slot: int) -> bytes:
        place = self.places.of(slot)
        return self._rows.read(place) if place else b""

    def put_row(self, slot: int, row: bytes) -> None:
        self._rows.write(self.places.put(slot), row)

    def _passed(self, batch: DraftBatch, place: int, newest: I64) -> Tensor:
        step = joining(batch, place, self.places)
        return self._logits(replace(step, input_ids=newest[: step.batch_size]) if place else step)


def joining(batch: DraftBatch, place: int, places: RowPlaces) -> ForwardBatch:
    """Return the pass that guesses the token in `place`: behind the first it joins its own rows."""
    step = batch.step(place)
    own = FIRST_OF_STEP + np.arange(step.batch_size)
    return replace(step, rows_before=own if place else places.before(step))
