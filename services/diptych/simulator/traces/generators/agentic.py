"""Coding agents with sub-agents: long contexts that grow by tool calls, and are sometimes begun anew.

Shaped after published figures of 219 sessions of Claude Code with 78,099 requests (llm-d's blog on GLM-5.2, 2026):
percentiles 50, 90 and 99 of inputs 195K, 521K, 849K; of outputs 317, 1705, 7551; of growth a turn 632, 3735, 148K; of
gaps 2 s, 24 s, 11.4 min; of turns 107, 354, 992; 96 % of turns reuse 90 % of their prompt or more; half of the requests
are in groups of sub-agents, with 7 requests at the median and 51 at the 90th percentile; 2.8 % of turns are resets.

A sub-agent is taken to begin with its parent's context, at a turn of the parent, and to go on beside it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import I64
from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.quantiles import Quantiles
from diptych.simulator.traces.generators.sessions import (
    Shape,
    Turns,
    beginnings,
    session_lens,
    streams,
    turns_of,
)

SHAPE: Final = Shape(
    turns=Quantiles(107, 354, 992, most=2000),
    begin=Quantiles(80_000, 180_000, 300_000),
    growth=Quantiles(632, 3735, 148_000, most=150_000),
    output=Quantiles(317, 1705, 7551, most=32_000),
    gap_s=Quantiles(2.0, 24.0, 684.0, least=0.1, most=3600.0),
    max_len=900_000,
    num_beginnings=8,
    beginning=Quantiles(18_000, 30_000, 40_000),
    reset_share=0.028,
)
SUB_AGENT_SHARE: Final = 0.5  # of requests
SUB_AGENT_TURNS: Final = Quantiles(7, 51, 200, most=400)


class _Agents(NamedTuple):
    """Main agents, or sub-agents of them. What is said of a turn has one entry a turn."""

    turns: Turns
    beginning: I64  # that a turn's session shares
    beginning_len: I64


def agentic(num_calls: int, rate: float, seed: int) -> Columns:
    """Return `num_calls` turns, `rate` a second, of agents and of the sub-agents that they start."""
    rng = np.random.default_rng(seed)
    num_sub = int(SUB_AGENT_SHARE * num_calls)
    main = _agents(rng, num_calls - num_sub)
    sub, fork = _sub_agents(rng, main, num_sub)
    window_s, both = num_calls / rate, (main.turns, sub.turns)
    main_s = rng.uniform(0, window_s, main.turns.num_sessions)[main.turns.session] + main.turns.offset_s
    laps, arrival_s = np.divmod(np.concatenate([main_s, main_s[fork] + sub.turns.offset_s]), window_s)
    stream = streams(np.concatenate([main.turns.epoch, main.turns.epoch[-1] + 1 + sub.turns.epoch]), laps)
    parent = np.concatenate([np.arange(len(main_s)), fork])
    may_share = np.concatenate([np.zeros(len(main_s), bool), sub.turns.is_first_epoch]) & (laps == laps[parent])
    return Columns(
        arrival_s,
        np.concatenate([turns.prompt_len for turns in both]),
        np.concatenate([turns.output_len for turns in both]),
        stream,
        np.concatenate([main.beginning, sub.beginning]),
        np.concatenate([main.beginning_len, sub.beginning_len]),
        stream[parent],
        np.where(may_share, main.turns.prompt_len[parent], 0),
        streams(main.turns.session[parent], laps),
    )


def _agents(rng: np.random.Generator, num_turns: int) -> _Agents:
    lens = session_lens(rng, SHAPE.turns, num_turns)
    beginning, beginning_len = beginnings(rng, SHAPE, len(lens))
    first_len = SHAPE.begin.draw_whole(rng, len(lens)) + beginning_len
    turns = turns_of(rng, SHAPE, lens, first_len, beginning_len)
    return _Agents(turns, beginning[turns.session], beginning_len[turns.session])


def _sub_agents(rng: np.random.Generator, main: _Agents, num_turns: int) -> tuple[_Agents, I64]:
    """Return them, and for each of their turns the turn of a main agent that began it."""
    lens = session_lens(rng, SUB_AGENT_TURNS, num_turns)
    forks = rng.integers(0, len(main.beginning), len(lens))
    turns = turns_of(rng, SHAPE, lens, main.turns.prompt_len[forks], main.beginning_len[forks])
    fork = forks[turns.session]
    return _Agents(turns, main.beginning[fork], main.beginning_len[fork]), fork
