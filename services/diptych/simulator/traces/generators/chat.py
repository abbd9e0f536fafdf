"""Conversations of people: several turns with time to think, behind one system prompt.

Shaped after Mooncake's conversation trace (FAST 2025): percentiles 50, 90 and 99 of its prompts and outputs, and the
share of prompt blocks that came before. The time to think is ours: nobody publishes it.
"""

from __future__ import annotations

from typing import Final

from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.quantiles import Quantiles
from diptych.simulator.traces.generators.sessions import Shape, sessions

SHAPE: Final = Shape(
    turns=Quantiles(1, 2.4, 7, most=40),
    begin=Quantiles(5200, 22_500, 75_000),
    growth=Quantiles(1300, 8000, 30_000),
    output=Quantiles(350, 597, 1119, most=4096),
    gap_s=Quantiles(20.0, 90.0, 600.0, most=1800.0),
    max_len=126_000,
    beginning=Quantiles(512, 512, 512),
)


def chat(num_calls: int, rate: float, seed: int) -> Columns:
    """Return `num_calls` turns, `rate` a second."""
    return sessions(num_calls, rate, seed, SHAPE)
