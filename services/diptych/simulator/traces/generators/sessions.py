"""Loads of sessions, of which each is a context that grows from turn to turn: chats, code assistants, agents.

A trace is a window of a load that has been running for long, and goes on: a session that would reach beyond the end of
the window goes on at its beginning, as another session that has begun before. So the load is the same throughout, even
where sessions last longer than the window. Turns follow each other after a gap, and the time that an answer takes on
a platform which is as fast as people expect; they do not wait for the platform that is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import F64, I64
from diptych.simulator.traces.closed_loop import TPOT_S, TTFT_S
from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.quantiles import Quantiles

BOOL = npt.NDArray[np.bool_]
N = TypeVar("N", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class Shape:
    """What sessions are like. Lengths in tokens."""

    turns: Quantiles
    begin: Quantiles  # the first prompt, without the beginning that it shares
    growth: Quantiles  # of a prompt from turn to turn: the answer, and what came of it
    output: Quantiles
    gap_s: Quantiles  # from an answer to the next turn
    max_len: int  # of a prompt
    beginning: Quantiles  # whole blocks that sessions share: system prompts, descriptions of tools, repositories
    num_beginnings: int = 1  # Zipf says how popular each is
    reset_share: float = 0.0  # of turns, whose context begins anew


@dataclass(frozen=True, slots=True)
class Turns:
    """Arrays with one entry a turn, session by session and in the order of time."""

    session: I64
    is_first: BOOL
    epoch: I64  # of one context, between two resets
    prompt_len: I64
    output_len: I64
    offset_s: F64  # since its session began

    @property
    def num_sessions(self) -> int:
        return int(self.is_first.sum())

    @property
    def is_first_epoch(self) -> BOOL:
        """Whether its session's context has not been begun anew."""
        found: BOOL = self.epoch == self.epoch[self.is_first][self.session]
        return found


def session_lens(rng: np.random.Generator, turns: Quantiles, num_calls: int) -> I64:
    """Return how many turns each session has, `num_calls` in all; the last one is cut short."""
    lens = np.zeros(0, np.int64)
    while lens.sum() < num_calls:
        lens = np.concatenate([lens, turns.draw_whole(rng, 1 + num_calls // max(1, int(turns.p50)))])
    ends = np.minimum(np.cumsum(lens), num_calls)
    return np.diff(ends, prepend=0)[: int(np.searchsorted(ends, num_calls)) + 1]


def turns_of(rng: np.random.Generator, shape: Shape, lens: I64, first_len: I64, beginning_len: I64) -> Turns:
    """Return the turns of sessions with so many each, of which the first has a prompt of `first_len`.

    After a reset a context has its beginning, and as much more as a new one.
    """
    num = int(lens.sum())
    session = np.repeat(np.arange(len(lens)), lens)
    is_first = np.diff(session, prepend=-1) > 0
    begins = is_first | (rng.random(num) < shape.reset_share)
    epoch = np.cumsum(begins) - 1
    anew = shape.begin.draw_whole(rng, num) + beginning_len[session]
    start = np.where(is_first, first_len[session], anew)[begins]
    growth = np.where(begins, 0, shape.growth.draw_whole(rng, num))
    prompt_len = np.minimum(start[epoch] + _within(growth, begins), shape.max_len)
    output_len = shape.output.draw_whole(rng, num)
    served_s = TTFT_S + TPOT_S * output_len
    waited_s = shape.gap_s.draw(rng, num) + np.concatenate([[0.0], served_s[:-1]])
    return Turns(session, is_first, epoch, prompt_len, output_len, _within(np.where(is_first, 0, waited_s), is_first))


def sessions(num_calls: int, rate: float, seed: int, shape: Shape) -> Columns:
    """Return `num_calls` turns, `rate` a second."""
    rng = np.random.default_rng(seed)
    lens = session_lens(rng, shape.turns, num_calls)
    beginning, beginning_len = beginnings(rng, shape, len(lens))
    first_len = shape.begin.draw_whole(rng, len(lens)) + beginning_len
    turns = turns_of(rng, shape, lens, first_len, beginning_len)
    window_s = num_calls / rate
    at_s = rng.uniform(0, window_s, len(lens))[turns.session] + turns.offset_s
    laps, arrival_s = np.divmod(at_s, window_s)
    return Columns(
        arrival_s,
        turns.prompt_len,
        turns.output_len,
        streams(turns.epoch, laps),
        beginning[turns.session],
        beginning_len[turns.session],
        session=streams(turns.session, laps),
    )


def beginnings(rng: np.random.Generator, shape: Shape, num_sessions: int) -> tuple[I64, I64]:
    """Return which shared beginning each session has, and how long that is: whole blocks."""
    weights = 1 / np.arange(1, shape.num_beginnings + 1)
    chosen = rng.choice(shape.num_beginnings, num_sessions, p=weights / weights.sum())
    return chosen, shape.beginning.draw_whole(rng, shape.num_beginnings)[chosen]


def streams(epoch: I64, laps: F64) -> I64:
    """Return one number for each part of an epoch, or of a session, that lies in one lap of the window."""
    lap = laps.astype(np.int64)
    numbers: I64 = np.unique(epoch * (int(lap.max(initial=0)) + 1) + lap, return_inverse=True)[1]
    return numbers


def _within(values: npt.NDArray[N], begins: BOOL) -> npt.NDArray[N]:
    """Return running sums that begin anew wherever `begins` is true."""
    sums = np.cumsum(values)
    before = (sums - values)[begins]
    found: npt.NDArray[N] = sums - before[np.cumsum(begins) - 1]
    return found
