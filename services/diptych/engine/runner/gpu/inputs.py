"""A step's inputs on a GPU: one copy, and for steps that are replayed the same addresses each time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import StagedBatch, extend_starts, logits_rows
from diptych.engine.runner.gpu.ladder import fill_up, pad
from diptych.engine.runner.gpu.staging import ALIGNMENT, Staging
from diptych.engine.values.batch import ForwardBatch

NUM_ARRAYS: Final = 8
NO_STATES: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step can have at most."""

    max_step_tokens: int  # of prompts
    max_requests: int
    max_pages: int  # of a request
    max_graph_tokens: int = 512  # of a step with prompts that is replayed
    max_drafts: int = 0  # of a request, verified in one step

    @property
    def most_graph_tokens(self) -> int:
        """The most tokens that a step from a graph can have."""
        return min(self.max_graph_tokens, self.max_step_tokens)

    @property
    def max_samples(self) -> int:
        """The most samples of a step: each token of a row has one."""
        return self.max_requests * (1 + self.max_drafts)

    @property
    def nbytes(self) -> int:
        """The bytes of a step's arrays."""
        num_tokens = self.max_step_tokens + self.max_samples
        per_token, per_request = (
            4 * 8,
            (2 + self.max_pages) * 4 + 8,
        )  # ids, positions, slots, rows; lengths, starts, pages, states
        return num_tokens * per_token + (self.max_samples + 1) * per_request + NUM_ARRAYS * ALIGNMENT


class StepInputs:
    """Stages steps. What it returns is good until it stages the next."""

    def __init__(self, limits: StepLimits, staging: Staging, device: torch.device) -> None:
        self._staging = staging
        self._page_table = torch.zeros(limits.max_samples, limits.max_pages, dtype=torch.int32, device=device)

    def stage(self, batch: ForwardBatch) -> StagedBatch:
        """Bring any step's arrays to the device. Those before the page table lie where the number of tokens says."""
        return self._stage(batch, batch.input_ids)

    def stage_filled_up(self, batch: ForwardBatch, rung: int) -> StagedBatch:
        """Bring a step there whose pieces have `rung` tokens: so many `input_ids`, always at one address."""
        return self._stage(batch, fill_up(batch.input_ids, rung))

    def stage_padded(self, batch: ForwardBatch, rung: int) -> StagedBatch:
        """Bring a decode step there as one of `rung` rows, at addresses that depend on `rung` alone.

        The page table is the one as wide as a request can become: the step's own is copied into it. What a replay
        finds behind that is of steps before, and behind the end of every request.
        """
        staged = self.stage(pad(batch, rung))
        table = self._page_table[:rung]
        table[:, : batch.page_table.shape[1]].copy_(staged.page_table)
        return replace(staged, page_table=table)

    def _stage(self, batch: ForwardBatch, input_ids: I64) -> StagedBatch:
        arrays = (
            input_ids,
            batch.positions,
            batch.out_slots,
            logits_rows(batch),
            batch.seq_lens.astype(np.int32),
            extend_starts(batch),
            NO_STATES if batch.states is None else batch.states.slots,
            batch.page_table,
        )
        ids, positions, slots, rows, lens, starts, states, table = self._staging.upload(arrays)
        has_states = batch.states is not None
        return StagedBatch(batch, ids, positions, slots, table, lens, starts, rows, states if has_states else None)
