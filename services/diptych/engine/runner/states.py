"""The states of recurrent layers: a slot for each running request, and copies of them in pages of the KV pool."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import Recurrent, StatePart
from diptych.common.arrays import I32, I64
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent.trials import new_trials
from diptych.engine.runner.kv_pool import DTYPES
from diptych.engine.values.batch import ForwardBatch, StateMoves
from diptych.engine.values.kv_regions import cell_nbytes, share_nbytes, slices, state_nbytes, state_part_nbytes

_AT_A_TIME: Final = 8  # states that are copied to pages: each takes twice its bytes meanwhile


class Units:
    """States as they lie in pages, unit by unit (`kv_regions`), of slots, where they lie layer by layer."""

    def __init__(self, slots: Tensor, recurrent: Recurrent, dtype: str) -> None:
        """`slots`: `[num_slots, state_nbytes]`, whose memory is kept."""
        self._nbytes, num_layers = share_nbytes(recurrent, dtype), len(recurrent.layers)
        self._cells = recurrent.mixer.num_units, num_layers
        cell, found = cell_nbytes(recurrent, dtype), slices(recurrent, dtype)
        layer = slots.shape[1] // num_layers
        self._word = _widest_word(cell, layer, *itertools.chain(*found))
        size = self._word.itemsize
        words = slots.view(self._word)
        self._places = []  # of each slice: in slots `[num_slots, num_units, num_layers, words]`, and in a cell
        for each in found:
            count = each.nbytes // size
            shape = (len(slots), *self._cells, count)
            strides = (words.shape[1], count, layer // size, 1)
            view = words.as_strided(shape, strides, words.storage_offset() + each.slot_offset // size)
            first = each.cell_offset // size
            self._places.append((view, slice(first, first + count)))

    def put(self, slots: Tensor, states: Tensor) -> None:
        """Set slots `[n]` to states `[n, nbytes of all pages]`."""
        cells = self._by_cells(states)
        for view, place in self._places:
            view[slots] = cells[..., place]

    def take(self, slots: Tensor, nbytes: int) -> Tensor:
        """Return the states of slots `[n]`, `[n, nbytes]`: zero where pages have more than a state."""
        states = torch.zeros(len(slots), nbytes, dtype=torch.uint8, device=slots.device)
        cells = self._by_cells(states)
        for view, place in self._places:
            cells[..., place].copy_(view[slots])
        return states

    def _by_cells(self, states: Tensor) -> Tensor:
        return states[:, : self._nbytes].view(self._word).view(len(states), *self._cells, -1)


def _widest_word(*sizes: int) -> torch.dtype:
    """Return what can be copied at a time where everything is a multiple of it."""
    common = math.gcd(*sizes)
    return next(word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if common % word.itemsize == 0)


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
        nbytes = state_nbytes(config.recurrent, dtype)
        self._slots = torch.zeros(num_slots, nbytes, dtype=torch.uint8, device=kv.device)
        self._units = Units(self._slots, config.recurrent, dtype)
        sizes = [state_part_nbytes(part, dtype) for part in parts]
        ends = list(itertools.accumulate(sizes * len(layers), initial=0))
        found = [self._part(start, part, dtype) for start, part in zip(ends[:-1], parts * len(layers), strict=True)]
        self._parts = {layer: tuple(found[i * len(parts) : (i + 1) * len(parts)]) for i, layer in enumerate(layers)}

        self.row_tokens, self._by_token = row_tokens, by_token
        self.out_size = config.recurrent.mixer.out_size  # numbers that a layer makes of a token
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

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def given(self, layer: int) -> Tensor:
        """Return what `layer` was given of the newest rows of several tokens."""
        return self._given[layer]

    def staged(self, batch: StagedBatch) -> StagedBatch:
        """Return the step with how its tokens take turns."""
        trials = new_trials(batch, self.row_tokens, by_token=self._by_token)
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
            self._units.put(self._on_device(moves.read_slots), pages.view(len(moves.read_slots), -1))
        return batch

    def behind(self, batch: ForwardBatch) -> None:
        """Copy what is wanted of the states that the step has left."""
        moves = batch.states
        assert moves is not None
        if len(moves.written_slots):
            slots, pages = self._on_device(moves.written_slots), self._on_device(moves.written_pages)
            page_nbytes = self._pages.shape[1]
            for some, to in zip(torch.split(slots, _AT_A_TIME), torch.split(pages, _AT_A_TIME), strict=True):
                states = self._units.take(some, moves.written_pages.shape[1] * page_nbytes)
                self._pages[to.ravel()] = states.view(-1, page_nbytes)

    def _of_nobody(self, num_requests: int) -> StateMoves:
        slots, none = np.arange(num_requests) % len(self._slots), np.zeros(0, np.int64)
        pages = np.zeros((0, 1), np.int32)
        late_lens = np.ones(num_requests, np.int64) if self.row_tokens > 1 else None
        return StateMoves(slots, none, none, pages, none, pages, late_lens)

    def _on_device(self, indices: I64 | I32) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64, copy=False)).to(self._slots.device)
