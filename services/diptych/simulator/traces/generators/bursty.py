"""Single questions that come in bursts: ten seconds of eight times the calm's rate, every hundred seconds.

Lengths are shaped after Azure's conversation trace of 2023 (Splitwise, ISCA 2024). No two prompts share anything, so
that nothing but the bursts makes the load hard.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.arrivals import Bursts, in_bursts
from diptych.simulator.traces.generators.quantiles import Quantiles

BURSTS: Final = Bursts()
PROMPT: Final = Quantiles(1020, 2734, 4142, most=14_000)
OUTPUT: Final = Quantiles(129, 424, 601, most=1000)


def bursty(num_calls: int, rate: float, seed: int) -> Columns:
    """Return `num_calls` calls, `rate` a second in the mean over many bursts."""
    rng = np.random.default_rng(seed)
    arrival_s = in_bursts(rng, num_calls, rate, BURSTS)
    lens = PROMPT.draw_whole(rng, num_calls), OUTPUT.draw_whole(rng, num_calls)
    return Columns(arrival_s, *lens, np.arange(num_calls))
