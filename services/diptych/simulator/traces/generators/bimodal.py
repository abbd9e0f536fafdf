"""Small requests that must be quick beside a few long ones that need not: 85 % and 15 %, the latter of 16K tokens.

The case of a study in which only the long prompts should go elsewhere (an oracle that does so brings the TTFT of the
small ones from 256 to 51 ms at the 99th percentile), and in which means of lengths say nothing. Tiers are `tight` and
`batch`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.simulator.traces.columns import Columns
from diptych.simulator.traces.generators.arrivals import poisson
from diptych.simulator.traces.generators.quantiles import Quantiles

BATCH_SHARE: Final = 0.15
BATCH_LEN: Final = 16_384
SMALL_PROMPT: Final = Quantiles(256, 480, 800)
SMALL_OUTPUT: Final = Quantiles(64, 128, 256)
BATCH_OUTPUT: Final = Quantiles(128, 256, 512)


def bimodal(num_calls: int, rate: float, seed: int) -> Columns:
    """Return `num_calls` calls, `rate` a second."""
    rng = np.random.default_rng(seed)
    is_batch = rng.random(num_calls) < BATCH_SHARE
    prompt_len = np.where(is_batch, BATCH_LEN, SMALL_PROMPT.draw_whole(rng, num_calls))
    output_len = np.where(is_batch, BATCH_OUTPUT.draw_whole(rng, num_calls), SMALL_OUTPUT.draw_whole(rng, num_calls))
    tiers = np.where(is_batch, "batch", "tight").tolist()
    return Columns(poisson(rng, num_calls, rate), prompt_len, output_len, np.arange(num_calls), tiers=tiers)
