"""Code assistants: long contexts that share a repository, grow by what tools say, and give short outputs.

Shaped after published figures of Codex on SWE-bench Pro (vLLM's blog on Mooncake, 2026; 610 traces): 33 turns, prompts
that grow from 12K to 80K tokens by 2,242 a turn, 131 tokens of prompt for one of output, gaps of 5.2 s at the median
and 81 s at the 99th percentile, 94.2 % of prompt tokens found cached.
"""

from __future__ import annotations

from typing import Final

from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.quantiles import Quantiles
from diptych.simulator.traces.generators.sessions import Shape, sessions

SHAPE: Final = Shape(
    turns=Quantiles(33, 42, 50, most=80),
    begin=Quantiles(3500, 8000, 16_000),
    growth=Quantiles(1250, 5500, 14_000),
    output=Quantiles(200, 800, 2500, most=8192),
    gap_s=Quantiles(5.2, 20.0, 81.0, least=0.5, most=600.0),
    max_len=200_000,
    num_beginnings=12,
    beginning=Quantiles(7680, 7680, 7680),
)


def code(num_calls: int, rate: float, seed: int) -> Columns:
    """Return `num_calls` turns, `rate` a second."""
    return sessions(num_calls, rate, seed, SHAPE)
