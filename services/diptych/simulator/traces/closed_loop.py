"""Sessions that wait for the platform: each call of a session comes when the one before it has been answered. Pure.

A trace has times at which calls came on a platform that was as fast as it was. Agents are no users of a clock: what a
slow platform costs them is that their jobs take longer. So a call keeps the gap to the answer before it, as far as the
trace says when that was, and a call that another one follows has called a tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from diptych.simulator.traces.call import Call

TTFT_S: Final = 0.5  # of an answer, between two turns of a trace: as generators have it
TPOT_S: Final = 0.02
MIN_GAP_S: Final = 0.1
TOOL: Final = "tool"


def closed_loop(calls: Sequence[Call]) -> list[Call]:
    """Return calls in their order: of each session all but the first come a while after the end of another."""
    before: dict[str, int] = {}
    made = list(calls)
    for number, call in enumerate(calls):
        if call.session and (last := before.get(call.session)) is not None:
            answered_s = calls[last].arrival_s + TTFT_S + TPOT_S * calls[last].output_len
            gap_s = round(max(MIN_GAP_S, call.arrival_s - answered_s), 6)
            made[number] = replace(made[number], gap_s=gap_s)
            made[last] = replace(made[last], tool=TOOL)
        before[call.session] = number
    return made
