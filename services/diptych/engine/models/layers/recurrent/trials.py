"""Rows of several tokens in recurrent layers: states see a token once it is known that it came true.

A row is tried on a copy of its request's state, which is thrown away: the slot stays as it was before the row. What the
row's tokens were given is kept. With the next step of the request its state sees those that came true, each by itself
and in order: so it has the bits that steps of one token leave. A copy is one layer's at a time, and what is kept of a
token is a small part of a state. Kernels of GPUs have the copy in registers, and are told by `SlotRows`: there states
see what came true before the step, see `late_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import StagedBatch, Trials, Turn, extend_starts
from diptych.engine.models.arithmetic.state_rules import StateRules
from diptych.engine.models.layers.attention import StateMixer


class LayerStates(Protocol):
    """What recurrent layers keep of requests, a slot each."""

    def of(self, layer: int) -> tuple[Tensor, ...]:
        """Return the parts that `layer` keeps, `[num_slots, ...]` each."""
        ...

    def given(self, layer: int) -> Tensor:
        """Return what `layer` was given of the newest rows, `[num_slots * row_tokens, mixer.in_size]`."""
        ...


def mix(
    mixer: StateMixer,
    rules: StateRules,
    layer: int,
    projected: Tensor,
    states: LayerStates,
    batch: StagedBatch,
    out: Tensor,
) -> None:
    """Do as `StateMixer.mix`, but for rows of several tokens, of which the slots see nothing yet."""
    state, trials = states.of(layer), batch.trials
    if batch.state_lens is not None and len(states.given(layer)):
        rules.keep_rows(projected, batch.state_rows, states.given(layer).view(len(state[0]), -1, projected.shape[1]))
    if trials is None:
        mixer.mix(projected, state, batch, out)
        return
    for turn in trials.late:
        see(mixer, layer, turn, states, out.shape[1])
    states.given(layer)[trials.places] = projected[trials.tokens]
    copies = tuple(part[trials.slots] for part in state)
    for turns, seen in ((trials.others, state), (trials.rows, copies)):
        for turn in turns:
            mixed = out.new_empty(len(turn.tokens), out.shape[1])
            mixer.mix(projected[turn.tokens], seen, turn.batch, mixed)
            out[turn.tokens] = mixed


def see(mixer: StateMixer, layer: int, late: Turn, states: LayerStates, out_size: int) -> None:
    """Let the states of a layer see what came true: `late.tokens` are places in what it was given."""
    given = states.given(layer)
    mixer.mix(given[late.tokens], states.of(layer), late.batch, given.new_empty(len(late.tokens), out_size))


def new_trials(staged: StagedBatch, row_tokens: int, *, by_token: bool) -> Trials | None:
    """Return how a step's tokens take turns; None where no row has several tokens and nobody's came true.

    `row_tokens`: of the longest row. `by_token`: mixers compute several tokens of a request one by one, with the bits
    of single ones.
    """
    host, moves = staged.host, staged.host.states
    assert moves is not None
    is_row, lens = host.num_sampled > 1, host.extend_lens
    late_lens = np.zeros_like(lens) if moves.late_lens is None else moves.late_lens
    if not (is_row.any() or late_lens.any()):
        return None
    assert lens[is_row].max(initial=0) <= row_tokens, "a row is longer than what is kept of it"
    starts, firsts = extend_starts(host)[:-1].astype(np.int64), moves.slots * row_tokens
    rows, others, late = (np.flatnonzero(each) for each in (is_row, ~is_row, late_lens))
    whole = [(others, lens[others])] if len(others) else []
    turns = [*_turns(lens[rows], by_token=by_token)]
    return Trials(
        late=[
            _turn(staged, late[who], firsts[late[who]] + place, num, moves.slots[late[who]])
            for who, place, num in _turns(late_lens[late], by_token=by_token)
        ],
        others=[_turn(staged, who, starts[who], num, moves.slots[who]) for who, num in whole],
        rows=[_turn(staged, rows[who], starts[rows[who]] + place, num, who) for who, place, num in turns],
        slots=_on_device(moves.slots[rows], staged),
        tokens=_on_device(_spans(starts[rows], lens[rows]), staged),
        places=_on_device(_spans(firsts[rows], lens[rows]), staged),
    )


def _turns(lens: I64, *, by_token: bool) -> Sequence[tuple[I64, int, I64]]:
    """Return who takes part in each turn of requests with so many tokens, from which token on, and with how many."""
    if by_token:
        return [(np.arange(len(lens)), 0, lens)] if len(lens) else []
    each = [(np.flatnonzero(lens > place), place) for place in range(lens.max(initial=0))]
    return [(who, place, np.ones_like(who)) for who, place in each]


def _turn(staged: StagedBatch, requests: I64, firsts: I64, lens: I64, slots: I64) -> Turn:
    """`requests` of the step have `lens` tokens each from `firsts` on, and their states in `slots`."""
    host = replace(staged.host, seq_lens=staged.host.seq_lens[requests], extend_lens=lens)
    starts = torch.from_numpy(extend_starts(host)).to(staged.input_ids.device)
    part = replace(staged, host=host, extend_starts=starts, state_slots=_on_device(slots, staged), trials=None)
    return Turn(_on_device(_spans(firsts, lens), staged), part)


def _spans(firsts: I64, lens: I64) -> I64:
    """Return `lens` numbers from each of `firsts` on, one after the other."""
    shifts: I64 = np.repeat(firsts - (np.cumsum(lens) - lens), lens)
    return shifts + np.arange(len(shifts))


def _on_device(indices: I64, staged: StagedBatch) -> Tensor:
    return torch.from_numpy(indices).to(staged.input_ids.device)
