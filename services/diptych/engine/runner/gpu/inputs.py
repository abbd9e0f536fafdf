"""A step's inputs on a GPU: one copy, and for steps that are replayed the same addresses each time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import StagedBatch, extend_starts, logits_rows, state_lens
from diptych.engine.runner.gpu.ladder import NO_SLOT, fill_up, ladder, nobodys, pad
from diptych.engine.runner.gpu.staging import ALIGNMENT, Array, Staging
from diptych.engine.values.batch import ForwardBatch, WindowGroups
from diptych.kernels.row_groups import RowGroups, row_groups
from diptych.kernels.token_tiles import I32, TokenTiles, tile_tokens

NUM_ARRAYS: Final = 19
NO_STATES: Final = (np.zeros(0, np.int64), np.zeros(0, np.int32))
NO_ADAPTERS: Final = (np.zeros(0, np.int32), np.zeros(0, np.int32))
NO_GROUPS: Final = NO_ADAPTERS
NO_ROWS: Final = 0
NONE_JOINED: Final = np.zeros(0, np.int64)
NO_WINDOWS: Final = WindowGroups(np.zeros((0, 0, 0), np.int32), np.zeros((0, 0), np.int64))


Tiled = tuple[I32, I32]  # see `tile_tokens`


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step can have at most."""

    max_step_tokens: int  # of prompts
    max_requests: int
    max_pages: int  # of a request
    max_graph_tokens: int = 512  # of a step with prompts that is replayed
    max_drafts: int = 0  # that a step verifies, of all its requests
    num_window_groups: int = 0  # of layers, see `WindowGroups`
    max_loras: int = 0  # slots of adapters
    looks_ahead: bool = False  # rows of an image see each other
    num_axes: int = 0  # by which positions turn, in models of several: see `rope_positions`

    @property
    def most_graph_tokens(self) -> int:
        """The most tokens that a step from a graph can have."""
        return min(self.max_graph_tokens, self.max_step_tokens)

    @property
    def max_samples(self) -> int:
        """The most samples of a step: each token of a row has one. So many rows of one token it has, too."""
        return self.max_requests + self.max_drafts

    @property
    def nbytes(self) -> int:
        """The bytes of a step's arrays."""
        num_tokens, num_groups = self.max_step_tokens + self.max_samples, 1 + self.num_window_groups
        of_adapters = 2 * (4 + 12) if self.max_loras else 0  # all tokens and the late ones, and their tiles
        per_token = (4 + num_groups + self.num_axes) * 8 + of_adapters  # ids, positions, rows and those before; slots
        of_rows = 2 if self.max_drafts else 0  # where they begin that attend together, and their numbers
        per_request = (2 + of_rows + num_groups * self.max_pages) * 4 + 8 + 4  # lengths, starts; pages; states
        return num_tokens * per_token + (self.max_samples + 1) * per_request + NUM_ARRAYS * ALIGNMENT


class StepInputs:
    """Stages steps. What it returns is good until it stages the next."""

    def __init__(
        self, limits: StepLimits, staging: Staging, device: torch.device, rows_together: int = NO_ROWS
    ) -> None:
        """`rows_together`: of a request, that attention takes at once at most."""
        self._staging = staging
        self._num_adapters, self._num_axes = limits.max_loras, limits.num_axes
        self._rungs = ladder(limits.max_samples)
        self._rows_together = rows_together if limits.max_drafts else 0
        shape = (1 + limits.num_window_groups, limits.max_samples, limits.max_pages)
        self.nobodys = nobodys(limits.num_window_groups)
        self._page_tables = torch.zeros(shape, dtype=torch.int32, device=device)

    def stage(self, batch: ForwardBatch) -> StagedBatch:
        """Bring any step's arrays to the device. Those before the page tables lie where the number of tokens says."""
        return self._stage(batch, batch.input_ids)

    def stage_filled_up(self, batch: ForwardBatch, rung: int) -> StagedBatch:
        """Bring a step there whose pieces have `rung` tokens: so many `input_ids`, always at one address.

        So are their adapters.
        """
        return self._stage(batch, fill_up(batch.input_ids, rung))

    def stage_padded(self, batch: ForwardBatch, rung: int) -> StagedBatch:
        """Bring a decode step there as one of `rung` rows, at addresses that depend on `rung` alone.

        The page tables are those as wide as a request can become: the step's own are copied into them. What a replay
        finds behind that is of steps before, and behind the end of every request.
        """
        staged = self.stage(pad(batch, rung))
        table, windows, width = self._page_tables[0, :rung], self._page_tables[1:, :rung], batch.page_table.shape[1]
        table[:, :width].copy_(staged.page_table)
        if staged.window_tables is None:
            return replace(staged, page_table=table)
        windows[:, :, :width].copy_(staged.window_tables)
        return replace(staged, page_table=table, window_tables=windows)

    def _stage(self, batch: ForwardBatch, input_ids: I64) -> StagedBatch:
        windows = batch.window_groups or NO_WINDOWS
        late_rows = self._late_rows(batch)
        of_all, of_late = self._adapters(batch, len(input_ids), len(late_rows))
        joined = NONE_JOINED if batch.rows_before is None else fill_up(batch.rows_before, len(input_ids))
        arrays: list[Array] = [
            input_ids,
            joined,
            *of_all,  # which are read at one address, too
            batch.positions,
            self._axes(batch),
            batch.out_slots,
            late_rows,
            batch.seq_lens.astype(np.int32),
            extend_starts(batch),
            *self._row_groups(batch),
            *(NO_STATES if batch.states is None else (batch.states.slots, state_lens(batch))),
            windows.out_slots,
            *of_late,
            batch.page_table,
            windows.page_tables,
        ]
        uploaded = self._staging.upload(arrays)
        ids, before, tokens, token_tiles, positions, axes, slots, rows, lens, starts = uploaded[:10]
        firsts, counts, states, row_lens, window_slots, late, late_tiles, table, tables = uploaded[10:]
        staged = StagedBatch(batch, ids, positions, slots, table, lens, starts, rows)
        if batch.rows_before is not None:
            staged = replace(staged, rows_before=before)
        if self._num_axes:
            staged = replace(staged, rope_positions=axes)
        if self._rows_together:
            staged = replace(staged, row_groups=RowGroups(firsts, counts))
        if batch.adapters is not None:
            of_tokens, of_rows = TokenTiles(tokens, token_tiles), TokenTiles(late, late_tiles)
            staged = replace(staged, adapters=of_tokens, late_adapters=of_rows)
        if batch.states is not None:
            staged = replace(staged, state_slots=states, state_lens=row_lens)
        if batch.window_groups is not None:
            staged = replace(staged, window_tables=tables, window_slots=window_slots)
        return staged

    def _axes(self, batch: ForwardBatch) -> I64:
        """Return `[num_axes, num_tokens]` positions, also of steps of text: a graph reads them in each."""
        if batch.rope_positions is not None and self._num_axes:
            return batch.rope_positions
        return np.broadcast_to(batch.positions, (self._num_axes, len(batch.positions)))

    def _late_rows(self, batch: ForwardBatch) -> I64:
        """Return `logits_rows`, as many as a graph of decode steps has: the first token stands for those it lacks.

        So what follows the last attention has few sizes, which were all met when graphs were captured. A library that
        loads kernels when it first meets a size waits for the device meanwhile; and here it has the whole step to do.
        """
        rows = logits_rows(batch)
        if batch.prompt_rows is not None or not len(rows):
            return rows
        return fill_up(rows, next((rung for rung in self._rungs if rung >= len(rows)), len(rows)))

    def _row_groups(self, batch: ForwardBatch) -> tuple[I32, I32]:
        """Return the arrays of the step's `RowGroups`, of the rows before prompts; each as long as the batch."""
        if not self._rows_together:
            return NO_GROUPS
        num_rows = int(np.append(batch.extend_lens != 1, True).argmax())
        row_lens = np.ones(num_rows, np.int64) if batch.row_lens is None else batch.row_lens
        own = row_lens[np.cumsum(row_lens) <= num_rows]
        firsts, counts = row_groups(own, self._rows_together)
        return fill_up(firsts, batch.batch_size).astype(np.int32), fill_up(counts, batch.batch_size).astype(np.int32)

    def _adapters(self, batch: ForwardBatch, num_tokens: int, num_late: int) -> tuple[Tiled, Tiled]:
        """Return the arrays of the step's two `TokenTiles`. Tokens that fill it up have no adapter."""
        if batch.adapters is None:
            return NO_ADAPTERS, NO_ADAPTERS
        owner = fill_up(np.repeat(batch.adapters, batch.extend_lens), num_tokens, NO_SLOT)
        late = fill_up(owner[logits_rows(batch)], num_late, NO_SLOT)
        return tile_tokens(owner, self._num_adapters), tile_tokens(late, self._num_adapters)
