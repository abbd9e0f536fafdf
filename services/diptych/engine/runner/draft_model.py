"""A draft model on a CPU: it follows the steps of the model that it guesses for, and runs ahead of them when asked.

Rule: what it keeps of a token lies in the page that has the model's own keys and values of it, and is computed in the
same step. So wherever pages are found, sent, kept, given back or read again, its part is there too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import stage
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.values.batch import NO_TOKEN, DraftBatch, ForwardBatch, OnLayer


class CpuDraftModel:
    """Implements `DraftModel`. One thread at a time may call it, between the steps of its model or in one."""

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        self._model = model
        self._device = device

    def follow(self, batch: ForwardBatch, on_layer: OnLayer | None) -> None:
        """Compute the tokens of a step, and no logits. `on_layer` hears of layers that lie behind the model's."""
        with torch.inference_mode():
            self._follow(batch, on_layer)

    def _follow(self, batch: ForwardBatch, on_layer: OnLayer | None) -> None:
        staged = stage(known(batch, self._model), self._device)
        self._model.attention.init_forward_metadata(staged)
        of_nothing = replace(staged, logits_rows=staged.logits_rows[:0])
        self._model.forward(of_nothing, behind(on_layer, self._model))

    def draft(self, batch: DraftBatch) -> I64:
        """See `DraftModel.draft`. On tensor-parallel ranks it is a collective, and rank 0 has what it returns."""
        found = np.full((len(batch.token_ids), batch.most), NO_TOKEN, np.int64)
        newest = np.zeros(0, np.int64)
        for step in batch.catching_up():
            self.follow(step, None)
        for place in range(batch.most):
            newest = self._agreed(self._passed(batch, place, newest)).numpy()
            found[: len(newest), place] = newest
        return found

    def row(self, slot: int) -> bytes:
        """See `DraftModel.row`."""
        return b""

    def put_row(self, slot: int, row: bytes) -> None:
        """See `DraftModel.put_row`."""
        return

    def _passed(self, batch: DraftBatch, place: int, newest: I64) -> Tensor:
        """Return the logits of the tokens in `place`; `newest` are those that the pass before has guessed."""
        step = batch.step(place)
        return self._logits(replace(step, input_ids=newest[: step.batch_size]) if place else step)

    def _logits(self, step: ForwardBatch) -> Tensor:
        with torch.inference_mode():
            staged = stage(known(step, self._model), self._device)
            self._model.attention.init_forward_metadata(staged)
            return self._model.forward(staged)

    def _agreed(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens, those of rank 0 on all ranks."""
        tokens = self._model.likeliest(logits).cpu()
        if self._model.communicator is not None:
            self._model.communicator.broadcast(tokens)
        return tokens


def behind(on_layer: OnLayer | None, draft: LoadedModel) -> OnLayer | None:
    """Return who hears of a draft model's layers: they are behind those of its model."""
    if on_layer is None:
        return None
    assert draft.main is not None, "it guesses for nobody"
    num_layers, hear = draft.main.num_layers, on_layer
    return lambda layer: hear(num_layers + layer)


def known(batch: ForwardBatch, draft: LoadedModel) -> ForwardBatch:
    """Return a step as the draft model sees it, whose layers keep all tokens, in the pages of the text.

    Its tokens are such as it has: models of one tokenizer may pad their vocabularies unlike.
    """
    if batch.window_groups is not None or batch.states is not None:
        batch = replace(batch, window_groups=None, states=None)
    last = draft.config.vocab_size - 1
    if batch.input_ids.max(initial=0) <= last:
        return batch
    return replace(batch, input_ids=np.minimum(batch.input_ids, last))
