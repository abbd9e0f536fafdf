"""A step's arrays where the model computes: what layers and attention read, so that none of them copies any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.common.arrays import I32, I64
from diptych.engine.values.batch import ForwardBatch, StateMoves
from diptych.kernels.row_groups import RowGroups
from diptych.kernels.slot_rows import SlotRows
from diptych.kernels.token_tiles import TokenTiles


class Watcher(Protocol):
    """Hears of what some layers of a step look at, and of what comes out of the last."""

    def before(self, layer: int, qkv: Tensor) -> None:
        """`qkv` was given to `AttentionBackend`; `layer` is counted among all of the model."""
        ...

    def behind(self, layer: int) -> None:
        """The keys of the step are in the pool."""
        ...

    def out(self, normed: Tensor) -> None:
        """`normed`, of `logits_rows`, was given to the output projection, and may be overwritten later."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Tokens that a recurrent layer mixes at once."""

    tokens: Tensor  # int64: where they are, one request's after the other's
    batch: StagedBatch  # of their requests alone, as far as such layers read it


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """How the tokens of a step take turns in recurrent layers, where some requests have rows of several tokens."""

    late: Sequence[Turn]  # that came true of rows before: `tokens` are places in what was kept of these
    others: Sequence[Turn]  # requests without such rows
    rows: Sequence[Turn]  # whose slots count the requests that have them
    slots: Tensor  # int64: these requests' own
    tokens: Tensor  # int64: all tokens of these rows
    places: Tensor  # int64: where what they are given is kept


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """`host`, and its arrays on the device of the KV pool.

    A decode step may be padded to the size of a recorded graph: by rows with `seq_lens` 0 and `out_slots` -1, for which
    nothing is read or stored, and what is computed means nothing. A step with prompts may be filled up, too: by
    `input_ids` alone, behind the step's own. Attention sees none of these.
    """

    host: ForwardBatch
    input_ids: Tensor  # int64 [num_tokens], or more
    positions: Tensor  # int64 [num_tokens]
    out_slots: Tensor  # int64 [num_tokens]
    page_table: Tensor  # int32 [batch_size, max_pages]
    seq_lens: Tensor  # int32 [batch_size]
    extend_starts: Tensor  # int32 [batch_size + 1]: first token of each request, and their number
    logits_rows: Tensor  # int64 [num_rows]: tokens whose logits are wanted: those to sample from, then prompt rows
    state_slots: Tensor | None = None  # int64 [batch_size]: of requests, in recurrent models
    state_lens: Tensor | None = None  # int32 [batch_size]: see `SlotRows`; None: each has a row of one token
    trials: Trials | None = None  # in recurrent models; None: no row has several tokens, or had in the step before
    window_tables: Tensor | None = None  # int32 [num_groups, batch_size, max_pages]: see `WindowGroups`
    window_slots: Tensor | None = None  # int64 [num_groups, num_tokens]
    adapters: TokenTiles | None = None  # of all tokens, on GPUs; None: nobody has one
    late_adapters: TokenTiles | None = None  # of those of `logits_rows`
    row_groups: RowGroups | None = None  # of the rows before prompts; None: each attends by itself
    rows_before: Tensor | None = None  # int64 [num_tokens], or as many as `input_ids`: see `ForwardBatch`
    rope_positions: Tensor | None = None  # int64 [3, num_tokens]: see `ForwardBatch`
    image_tokens: Tensor | None = None  # int64 [num_image_rows]: in whose place rows of images stand
    image_rows: Tensor | None = None  # [1 + num_taps, num_image_rows, hidden_size]: see `VisionTower.encode`
    embed_tokens: Tensor | None = None  # int64 [num_given_rows]: in whose place rows stand that clients gave
    embed_rows: Tensor | None = None  # [num_given_rows, hidden_size]
    watcher: Watcher | None = None  # None: nobody asks what tokens look at

    @property
    def state_rows(self) -> SlotRows:
        """Return the rows of a step of single tokens."""
        assert self.state_slots is not None
        if self.state_lens is None:
            return SlotRows.of_one_token(self.state_slots)
        return SlotRows(self.state_slots, self.state_lens)

    def of_group(self, group: int) -> StagedBatch:
        """Return the step as layers of one group of pages see it, at the addresses that it has."""
        host = self.host.of_group(group)
        if not group:
            return replace(self, host=host, window_tables=None, window_slots=None)
        assert self.window_tables is not None
        assert self.window_slots is not None
        table, slots = self.window_tables[group - 1], self.window_slots[group - 1]
        return replace(self, host=host, page_table=table, out_slots=slots, window_tables=None, window_slots=None)


def stage(batch: ForwardBatch, device: torch.device) -> StagedBatch:
    """Copy the arrays of a step, one by one. On the CPU most are shared, not copied."""

    def staged(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    windows = batch.window_groups
    return StagedBatch(
        host=batch,
        input_ids=staged(batch.input_ids),
        positions=staged(batch.positions),
        out_slots=staged(batch.out_slots),
        page_table=staged(batch.page_table),
        seq_lens=staged(batch.seq_lens.astype(np.int32)),
        extend_starts=staged(extend_starts(batch)),
        logits_rows=staged(logits_rows(batch)),
        state_slots=None if batch.states is None else staged(batch.states.slots),
        window_tables=None if windows is None else staged(windows.page_tables),
        window_slots=None if windows is None else staged(windows.out_slots),
        rows_before=None if batch.rows_before is None else staged(batch.rows_before),
        rope_positions=None if batch.rope_positions is None else staged(batch.rope_positions),
    )


def extend_starts(batch: ForwardBatch) -> I32:
    """Return where each request's tokens start, and behind them where the last ones end."""
    starts = np.zeros(batch.batch_size + 1, dtype=np.int32)
    np.cumsum(batch.extend_lens, out=starts[1:])
    return starts


def single_rows(batch: ForwardBatch) -> ForwardBatch:
    """Return the step with each row of several tokens as rows of one, in their order, over the same pages.

    Attention computes each token of a row as it would alone, once the keys and values of all are stored: with the same
    kernels, and from the same graphs.
    """
    if (batch.num_sampled <= 1).all():
        return batch
    row_lens = np.where(batch.is_row, batch.extend_lens, 1)
    owner = np.repeat(np.arange(batch.batch_size), row_lens)
    extend_lens = np.where(batch.is_row, 1, batch.extend_lens)[owner]
    windows = batch.window_groups
    return replace(
        batch,
        page_table=batch.page_table[owner],
        seq_lens=batch.positions[np.cumsum(extend_lens) - 1] + 1,
        extend_lens=extend_lens,
        num_sampled=np.minimum(batch.num_sampled, 1)[owner],
        states=batch.states and _of_single_rows(batch.states, row_lens),
        adapters=None if batch.adapters is None else batch.adapters[owner],
        window_groups=windows and replace(windows, page_tables=windows.page_tables.take(owner, axis=1)),
        row_lens=row_lens,
    )


def _of_single_rows(moves: StateMoves, row_lens: I64) -> StateMoves:
    """Return the same of each row of one token. What came true is told with the first of a request."""
    slots = np.repeat(moves.slots, row_lens)
    if moves.late_lens is None:
        return replace(moves, slots=slots)
    late_lens = np.zeros_like(slots)
    late_lens[np.cumsum(row_lens) - row_lens] = moves.late_lens
    return replace(moves, slots=slots, late_lens=late_lens)


def state_lens(batch: ForwardBatch) -> I32:
    """Return the lengths of `SlotRows` of a step of `single_rows`: slots see nothing of rows of several tokens yet."""
    row_lens = np.ones(batch.batch_size, np.int64) if batch.row_lens is None else batch.row_lens
    lens = np.zeros(batch.batch_size, np.int32)
    lens[np.cumsum(row_lens) - row_lens] = np.where(row_lens > 1, -row_lens, 1)
    return lens


def logits_rows(batch: ForwardBatch) -> I64:
    """Return the tokens whose logits are wanted: those to sample from, then the prompt rows."""
    rows = batch.sampled_tokens
    return rows if batch.prompt_rows is None else np.concatenate([rows, batch.prompt_rows.token_rows])
