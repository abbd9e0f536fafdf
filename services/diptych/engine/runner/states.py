"""The states of recurrent layers: a slot for each running request, and copies of them in pages of the KV pool."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import StatePart
from diptych.common.arrays import I32, I64
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent.trials import new_trials
from diptych.engine.runner.kv_pool import DTYPES
from diptych.engine.values.batch import ForwardBatch, StateMoves
from diptych.engine.values.kv_regions import state_nbytes, state_part_nbytes


class SlotStates:
    """Implements `LayerStates` for one rank's part of a model. Work is queued on the current stream."""

    def __init__(
        self,
        config: ModelConfig,
        kv: Tensor,
        num_slots: int,
        dtype: str,
        row_tokens: int = 1,
        *,
        by_token: bool = False,
    ) -> None:
        """`kv` is the pool whose pages hold copies; `dtype` that of the layers.

        `row_tokens`: of the longest row that a request may have; `by_token`: see `Ops.mixes_by_token`.
        """
        assert config.recurrent is not None
        self._pages = kv.view(torch.uint8).view(len(kv), -1)  # [num_pages, page_nbytes]
        layers, parts = config.recurrent.layers, config.recurrent.mixer.state_parts
        page_nbytes = self._pages.shape[1]
        nbytes = -(-state_nbytes(config.recurrent, dtype) // page_nbytes) * page_nbytes
        self._slots = torch.zeros(num_slots, nbytes, dtype=torch.uint8, device=kv.device)
        sizes = [state_part_nbytes(part, dtype) for part in parts]
        ends = list(itertools.accumulate(sizes * len(layers), initial=0))
        found = [self._part(start, part, dtype) for start, part in zip(ends[:-1], parts * len(layers), strict=True)]
        self._parts = {layer: tuple(found[i * len(parts) : (i + 1) * len(parts)]) for i, layer in enumerate(layers)}

        self._row_tokens, self._by_token = row_tokens, by_token
        size = num_slots * row_tokens if row_tokens > 1 else 0, config.recurrent.mixer.in_size
        self._given = {layer: torch.empty(size, dtype=DTYPES[dtype], device=kv.device) for layer in layers}

    def _part(self, start: int, part: StatePart, dtype: str) -> Tensor:
        kind = torch.float32 if part.is_wide else DTYPES[dtype]
        nbytes = math.prod(part.shape) * kind.itemsize
        return self._slots[:, start : start + nbytes].view(kind).view(len(self._slots), *part.shape)

    def on(self, kv: Tensor) -> SlotStates:
        """Return the same slots beside another pool, of pages as large."""
        other = copy.copy(self)
        other._pages = kv.view(torch.uint8).view(len(kv), -1)
        return other

    def of(self, layer: int) -> tuple[Tensor, ...]:
        """Return the parts that `layer` keeps, `[num_slots, ...]` each."""
        return self._parts[layer]

    def given(self, layer: int) -> Tensor:
        """Return what `layer` was given of the newest rows of several tokens."""
        return self._given[layer]

    def staged(self, batch: StagedBatch) -> StagedBatch:
        """Return the step with how its tokens take turns."""
        trials = new_trials(batch, self._row_tokens, by_token=self._by_token)
        return batch if trials is None else replace(batch, trials=trials)

    def before(self, batch: ForwardBatch) -> ForwardBatch:
        """Let the requests of a step find what they begin with; return the step.

        A step of nobody's, which says nothing of states, is run to be measured: it uses any slots, and leaves in them
        what no request will see.
        """
        moves = batch.states
        if moves is None:
            return replace(batch, states=self._of_nobody(batch.batch_size))
        if len(moves.cleared):
            self._slots[self._on_device(moves.cleared)] = 0
        if len(moves.read_slots):
            pages = self._pages[self._on_device(moves.read_pages.ravel())]
            self._slots[self._on_device(moves.read_slots)] = pages.view(len(moves.read_slots), -1)
        return batch

    def behind(self, batch: ForwardBatch) -> None:
        """Copy what is wanted of the states that the step has left."""
        moves = batch.states
        assert moves is not None
        if len(moves.written_slots):
            states = self._slots[self._on_device(moves.written_slots)]
            self._pages[self._on_device(moves.written_pages.ravel())] = states.view(-1, self._pages.shape[1])

    def _of_nobody(self, num_requests: int) -> StateMoves:
        slots, none = np.arange(num_requests) % len(self._slots), np.zeros(0, np.int64)
        pages = np.zeros((0, self._slots.shape[1] // self._pages.shape[1]), np.int32)
        return StateMoves(slots, none, none, pages, none, pages)

    def _on_device(self, indices: I64 | I32) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64, copy=False)).to(self._slots.device)
