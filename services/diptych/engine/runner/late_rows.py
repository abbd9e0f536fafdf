"""States see what came true of rows of drafts, on a GPU: before the next step, which then finds them up to date.

A row leaves the slots of recurrent layers as they were, and what the layers were given of it is kept. So many of its
tokens as came true are mixed once more here, this time into the slots, by the same kernels, and by graphs of their own:
how many tokens these are has nothing to do with how many the step has, and most steps come behind none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I32, I64
from diptych.engine.attention.staged_batch import StagedBatch, Turn, extend_starts
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.layers.recurrent.trials import see
from diptych.engine.runner.gpu.graphs import Graphs
from diptych.engine.runner.gpu.ladder import NO_SLOT, fill_up
from diptych.engine.runner.gpu.staging import ALIGNMENT, Array, Staging
from diptych.engine.runner.gpu.warm_up import up_to
from diptych.engine.runner.states import SlotStates
from diptych.engine.values.batch import ForwardBatch, ForwardMode, StateMoves
from diptych.engine.values.limits import MAX_DRAFTS

LIKELY_ROW: Final = 4  # tokens of a row that come true, where passes are measured
NUM_TIMES: Final = 4  # of each size, the fastest of which counts
TOKEN_NBYTES: Final = 8 + 8 + 4 + 4  # its place, its slot, a length, a start


def staged_nbytes(states: SlotStates, max_rows: int) -> int:
    """Return what `LateRows` stages at most: a row of each slot, or a graph, or a step of nobody's, of `max_rows`."""
    num_tokens = max(states.num_slots * states.row_tokens, max_rows)
    return (num_tokens + 1) * TOKEN_NBYTES + 4 * ALIGNMENT


class LateRows:
    """Work is queued on the current stream. Nothing waits for the device."""

    def __init__(self, decoder: Decoder, states: SlotStates, staging: Staging, graphs: Graphs) -> None:
        """`staging` has room for `staged_nbytes`. What no graph of `graphs` holds is queued kernel by kernel."""
        self._decoder = decoder
        self._states = states
        self._staging = staging
        self.graphs = graphs
        self.times: Sequence[tuple[int, float]] = ()  # seconds of so many tokens, once they were measured

    def queue(self, moves: StateMoves) -> None:
        """Let the states see the tokens that a step tells of, each once."""
        if moves.late_lens is None or not moves.late_lens.any():
            return
        num_tokens = int(moves.late_lens.sum())
        rung = next((rung for rung in self.graphs.rungs if rung >= num_tokens), None)
        if rung is None:
            self._see(self._staged(moves, num_tokens))
            return
        if rung not in self.graphs:
            self._capture(rung, self._staged(moves, rung))
        self._staged(moves, rung)
        self.graphs.replay(rung)

    def measure(self, finish: Callable[[], object], clock: Callable[[], float]) -> None:
        """Find out what it takes, from the launch on, by tokens; `finish` waits for the device.

        Rows have `LIKELY_ROW` tokens, as far as there are slots. States are overwritten: it is for a worker that has
        not begun to serve.
        """
        states, rungs = self._states, self.graphs.rungs
        most = rungs[-1] if rungs else states.num_slots + MAX_DRAFTS
        sizes = up_to(min(most, states.num_slots * states.row_tokens))
        times, least_s = [], 0.0
        for size in sizes:
            moves = _rows_of(size, max(LIKELY_ROW, -(-size // states.num_slots)))
            took_s = []
            for _ in range(NUM_TIMES):
                finish()
                began_s = clock()
                self.queue(moves)
                finish()
                took_s.append(clock() - began_s)
            least_s = max(least_s, min(took_s))
            times.append((size, least_s))
        self.times = times

    def _capture(self, rung: int, late: Turn) -> None:
        """What is captured is run meanwhile, so nobody's state may take part."""
        assert late.batch.state_slots is not None
        late.batch.state_slots.fill_(NO_SLOT)
        self.graphs.capture(rung, lambda: self._see(late))

    def _see(self, late: Turn) -> Tensor:
        for index, layer in enumerate(self._decoder.layers):
            if layer.mixer is not None:
                see(layer.mixer, index, late, self._states, self._states.out_size)
        return torch.empty(0)

    def _staged(self, moves: StateMoves, size: int) -> Turn:
        """Bring there whose the tokens are, as a step of `size` tokens, at addresses that depend on `size` alone."""
        assert moves.late_lens is not None
        assert moves.late_lens.max() <= self._states.row_tokens, "more came true than is kept of a row"
        places, slots, lens = late_tokens(moves, self._states.row_tokens)
        host = _single_tokens(size)
        row_lens = np.pad(lens, (0, size - len(lens)))
        arrays: list[Array] = [fill_up(places, size), fill_up(slots, size, NO_SLOT), row_lens, extend_starts(host)]
        at, of_tokens, of_rows, starts = self._staging.upload(arrays)
        step = StagedBatch(host, at, at, at, at, at, starts, at, state_slots=of_tokens, state_lens=of_rows)
        return Turn(at, step)


def late_tokens(moves: StateMoves, row_tokens: int) -> tuple[I64, I64, I32]:
    """Return of each token that came true its place in what is kept of rows, its slot, and the length in `SlotRows`."""
    assert moves.late_lens is not None
    who = np.flatnonzero(moves.late_lens)
    lens = moves.late_lens[who]
    firsts = np.cumsum(lens) - lens
    slots = np.repeat(moves.slots[who], lens)
    row_lens = np.zeros(len(slots), np.int32)
    row_lens[firsts] = lens
    return slots * row_tokens + np.arange(len(slots)) - np.repeat(firsts, lens), slots, row_lens


def _rows_of(num_tokens: int, row_len: int) -> StateMoves:
    """Return that so many tokens came true, in rows of `row_len` and one of what is left."""
    lens = np.full(-(-num_tokens // row_len), row_len)
    lens[-1] -= lens.sum() - num_tokens
    none, pages = np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
    return StateMoves(np.arange(len(lens)), none, none, pages, none, pages, lens)


def _single_tokens(num_tokens: int) -> ForwardBatch:
    """Return a step of which recurrent layers read lengths alone."""
    ones, nothing = np.ones(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    table = np.zeros((num_tokens, 0), np.int32)
    return ForwardBatch(ForwardMode.DECODE, nothing, nothing, nothing, table, ones, ones, nothing)
