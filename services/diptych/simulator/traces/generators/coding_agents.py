"""Coding agents that fix an issue each: a context that grows by tool calls until the job is done.

Shaped after published figures of 610 traces of Codex on SWE-bench Pro (vLLM's blog, 2026): 33 turns, prompts that grow
from 12K to 80K tokens by 2,242 a turn, 131 tokens of prompt to one of output, gaps from 5.2 to 81 s. Only middles and
ends are published; what is between them is drawn as other sessions' lengths are.
"""

from __future__ import annotations

from typing import Final

from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.quantiles import Quantiles
from diptych.simulator.traces.generators.sessions import Shape, sessions

SHAPE: Final = Shape(
    turns=Quantiles(33, 60, 100, most=120),
    begin=Quantiles(6_000, 8_000, 12_000),
    growth=Quantiles(1_500, 4_500, 12_000, most=16_000),
    output=Quantiles(250, 700, 2_000, most=8_000),
    gap_s=Quantiles(5.2, 30.0, 81.0, least=0.1, most=300.0),
    max_len=120_000,
    num_beginnings=2,
    beginning=Quantiles(6_144, 6_144, 6_144),
)


def coding_agents(num_calls: int, rate: float, seed: int) -> Columns:
    """Return `num_calls` turns, `rate` a second."""
    return sessions(num_calls, rate, seed, SHAPE)
