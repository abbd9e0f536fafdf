"""A draft model on a GPU: a runner of its own on the pool of the model that it guesses for, with graphs of its own.

Passes are queued one behind the other: each finds the tokens of the one before on the device, as steps of a model do
that overlap. Only the end waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.runner.draft_model import behind, known
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.values.batch import NO_TOKEN, DraftBatch, ForwardBatch, OnLayer

NewRunner = Callable[[Callable[[], OnLayer | None]], GpuRunner]  # who is asked who hears of each layer


class GpuDraftModel:
    """Implements `DraftModel`. It is called in the thread of its model's runner, and works on the same stream."""

    def __init__(self, model: LoadedModel, new_runner: NewRunner) -> None:
        self._model = model
        self._on_layer: OnLayer | None = None
        self._runner = new_runner(lambda: self._on_layer)

    def follow(self, batch: ForwardBatch, newest: Tensor, on_layer: OnLayer | None) -> None:
        """Queue the tokens of a step; its placeholders stand for `newest`."""
        self._runner.take(newest.clamp(max=self._model.config.vocab_size - 1))
        self._on_layer = behind(on_layer, self._model)
        try:
            self._runner.logits(replace(known(batch, self._model), adapters=None, prompt_rows=None))
        finally:
            self._on_layer = None

    def draft(self, batch: DraftBatch) -> I64:
        """See `DraftModel.draft`. On tensor-parallel ranks it is a collective, and rank 0 has what it returns."""
        found = np.full((len(batch.token_ids), batch.most), NO_TOKEN, np.int64)
        with torch.inference_mode():
            for step in batch.catching_up():
                self._runner.logits(known(step, self._model))
        guessed = [self._guess(self._step(batch, place)) for place in range(batch.most)]
        token_ids, begin = torch.cat(guessed).cpu().numpy(), 0
        for place, each in enumerate(guessed):
            found[: len(each), place] = token_ids[begin : begin + len(each)]
            begin += len(each)
        return found

    def row(self, slot: int) -> bytes:
        """See `DraftModel.row`."""
        return b""

    def put_row(self, slot: int, row: bytes) -> None:
        """See `DraftModel.put_row`."""
        return

    def _step(self, batch: DraftBatch, place: int) -> ForwardBatch:
        """Return the pass that guesses the token in `place`."""
        return known(batch.step(place), self._model)

    def _guess(self, step: ForwardBatch) -> Tensor:
        """Queue a pass; return its likeliest tokens to be. Other ranks get those of rank 0 with the next one."""
        with torch.inference_mode():
            token_ids = self._model.likeliest(self._runner.logits(step))
            self._runner.take(token_ids)
            return token_ids
