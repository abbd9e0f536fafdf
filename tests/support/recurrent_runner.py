"""A runner without a model whose tokens depend on a state of each request, too, besides all that is in its KV.

The state is folded from the request's tokens one after the other, differently in every cell of its slot: one that is
stale, advanced twice, short of a token, or in another one's pages gives a wrong token.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
from null_runner import NullRunner, entries, next_token

from diptych.common.arrays import I32, I64, U64
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult

NO_ENTRIES = np.zeros(0, np.uint64)
_PRIME = np.uint64(0xD6E8_FEB8_6659_FD93)


class RecurrentRunner:
    """Implements `Runner` and `OverlapRunner` by one without states, over its integer KV pool `[num_pages, ...]`."""

    def __init__(self, stateless: NullRunner, kv: U64, states: U64, vocab_size: int) -> None:
        """`states`: `[num_slots, num_cells]`."""
        self._stateless = stateless
        self._kv = kv
        self._states = states
        self._vocab_size = vocab_size
        self._rows: dict[int, U64] = {}  # by slot: the tokens of the newest row of several

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def sample(self, batch: ForwardBatch, logits: list[int], sampling: SamplingBatch) -> WaitForResult:
        return self._stateless.sample(batch, logits, sampling)

    def logits(self, batch: ForwardBatch) -> list[int]:
        moves = batch.states
        assert moves is not None
        self._states[moves.cleared] = 0
        if len(moves.read_slots):
            self._states[moves.read_slots] = self._found(moves.read_pages)
        tokens = self._stateless.logits(batch)
        spans = np.split(entries(batch.input_ids, batch.positions), np.cumsum(batch.extend_lens)[:-1])
        if moves.late_lens is not None:
            for slot, num_late in zip(moves.slots.tolist(), moves.late_lens.tolist(), strict=True):
                self._states[slot] = self._behind(slot, self._rows.get(slot, NO_ENTRIES)[:num_late])[-1]
        seen: list[U64] = []  # behind each of the tokens that something is sampled behind
        for slot, span, num_sampled in zip(moves.slots.tolist(), spans, batch.num_sampled.tolist(), strict=True):
            states = self._behind(slot, span)
            seen += states[len(states) - num_sampled :]
            if num_sampled > 1:
                self._rows[slot] = span
            else:
                self._states[slot] = states[-1]
        if len(moves.written_slots):
            self._keep(moves.written_pages, moves.written_slots)
        return [(token + mixed(state)) % self._vocab_size for token, state in zip(tokens, seen, strict=True)]

    def _behind(self, slot: int, span: U64) -> list[U64]:
        """Return a slot's state, and what it would be behind each token of `span`."""
        return list(accumulate(span, folded, initial=self._states[slot].copy()))

    def _found(self, pages: I32) -> U64:
        """Return what pages hold, `[num_read, num_cells]`."""
        return self._kv[pages].reshape(len(pages), -1)[:, : self._states.shape[1]]

    def _keep(self, pages: I32, slots: I64) -> None:
        shape = (*pages.shape, *self._kv.shape[1:])
        states = np.zeros((len(slots), math.prod(shape[1:])), self._states.dtype)
        states[:, : self._states.shape[1]] = self._states[slots]
        self._kv[pages] = states.reshape(shape)


def new_states(num_slots: int, num_cells: int) -> U64:
    """Return slots that hold nonsense: a request that begins must clear its own."""
    return np.full((num_slots, num_cells), 99, dtype=np.uint64)


def state_after(tokens: list[int], num_cells: int) -> U64:
    """The only right state."""
    state, array = np.zeros(num_cells, dtype=np.uint64), np.array(tokens, dtype=np.int64)
    for entry in entries(array, np.arange(len(array))):
        state = folded(state, entry)
    return state


def folded(state: U64, entry: np.uint64) -> U64:
    """A state after one more token. Its cells differ."""
    with np.errstate(over="ignore"):
        result: U64 = (state ^ entry ^ np.arange(len(state), dtype=np.uint64)) * _PRIME + np.uint64(1)
    return result


def mixed(state: U64) -> int:
    """What of a state goes into the next token: all its cells, and where they are."""
    with np.errstate(over="ignore"):
        return int(
            (state * (np.arange(len(state), dtype=np.uint64) * np.uint64(2) + np.uint64(1))).sum() >> np.uint64(33)
        )


def expected_output(prompt: list[int], num_tokens: int, vocab_size: int, num_cells: int) -> list[int]:
    """What any correct scheduler generates for `prompt`, where a state has so many cells."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        array: I64 = np.array(tokens, dtype=np.int64)
        following = next_token(entries(array, np.arange(len(array))), vocab_size)
        tokens.append((following + mixed(state_after(tokens, num_cells))) % vocab_size)
    return tokens[len(prompt) :]
