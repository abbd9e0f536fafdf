"""What a router has served, as counts since its start, and the bounds of the buckets that they are counted in."""

from __future__ import annotations

from typing import Final, NamedTuple

TTFT_BOUNDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)  # seconds
ITL_BOUNDS: Final = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0, 5.0, 30.0, 120.0, 600.0)


class Served(NamedTuple):
    """What was served since the start."""

    requests: float  # that ended, of any outcome
    errors: float  # that failed by our fault
    refused: float  # for lack of room
    finished: float  # outputs that came to their end
    good: float  # of those: within the objectives
    prompt_tokens: float  # of finished requests
    cached_tokens: float
    output_tokens: float
    ttft: tuple[float, ...]  # outputs in each bucket of `TTFT_BOUNDS`, and beyond
    itl: tuple[float, ...]  # gaps in each bucket of `ITL_BOUNDS`, and beyond
