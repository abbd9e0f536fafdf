"""The layer that predicts one token more, on a GPU: a draft model with the hidden rows of its model besides.

Rows stay on the device. Where they are is known to the host before the step has run, so nobody waits for them; and the
graphs of both models read and write them at one address.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diptych.engine.runner.gpu.gpu_draft_model import GpuDraftModel, NewRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.next_layer import joining
from diptych.engine.runner.row_places import RowPlaces
from diptych.engine.values.batch import DraftBatch, ForwardBatch, OnLayer


class GpuNextLayer(GpuDraftModel):
    """Implements `DraftModel`. It follows every step, so it has missed nothing that was computed here."""

    def __init__(self, model: LoadedModel, new_runner: NewRunner, limits: StepLimits) -> None:
        """Before any graph is recorded."""
        super().__init__(model, new_runner)
        assert model.rows is not None
        self._rows = model.rows
        self._rows.reserve(limits.max_step_tokens + limits.max_samples)
        self.places = RowPlaces(model.rows.page_size)
        device = model.rows.table.device
        is_gpu = device.type == "cuda"  # else it is emulated
        self._beside = torch.cuda.Stream(device) if is_gpu else None
        self._last_put = torch.cuda.Event() if is_gpu else None

    def follow(self, batch: ForwardBatch, newest: Tensor, on_layer: OnLayer | None) -> None:
        joined = replace(batch, rows_before=self.places.begin(batch))
        self._rows.keep(self.places.keep(batch))
        super().follow(joined, newest, on_layer)

    def row(self, slot: int) -> bytes:
        """See `DraftModel.row`. It is there since its step, or `put_row`, has run: no later step is waited for."""
        place = self.places.of(slot)
        if not place:
            return b""
        with torch.cuda.stream(self._beside):
            if self._last_put is not None:
                self._last_put.wait()
            return self._rows.read(place)

    def put_row(self, slot: int, row: bytes) -> None:
        self._rows.write(self.places.put(slot), row)
        if self._last_put is not None:
            self._last_put.record()

    def _step(self, batch: DraftBatch, place: int) -> ForwardBatch:
        return joining(batch, place, self.places)
