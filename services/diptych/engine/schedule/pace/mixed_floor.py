"""How long a step with tokens and prompts takes at least, however few prompts it has. Pure.

Its kernels are more than those of a step without prompts, and are not replayed as one graph: the host launches them one
by one, and may take longer than they do. So a few tokens of a prompt take as long as some hundreds. What that comes to
is learned from steps with few, by the work of their tokens: where the device is the limit it grows with that, and where
the host is it does not.
"""

from __future__ import annotations

from typing import Final

from diptych.engine.schedule.pace.step_times import NEAR, StepLine

FEW: Final = 0.25  # of the time that reading weights takes: products of so little are hidden, whatever else is known
CLEAR: Final = 1.05  # times as long as without prompts: less is what steps differ by
BELOW: Final = 0.75  # of the floor: what was to take longer tells of products, too


class MixedFloor:
    """Tell it of steps with few prompts beside tokens."""

    def __init__(self) -> None:
        self._whole = StepLine()  # the seconds of such steps, by the work of their tokens

    def beyond(self, work: int, tokens_s: float) -> float:
        """Return how much longer such a step takes than one without prompts, which takes `tokens_s`; 0: hardly."""
        if not self._whole.is_known:
            return 0.0
        whole_s = self._whole.at(work)
        return whole_s - tokens_s if whole_s > CLEAR * tokens_s else 0.0

    def learn(self, work: int, seconds: float) -> None:
        """A step with few prompts took so long."""
        self._whole.learn(work, seconds)


def are_few(cost: int, line: StepLine, read_s: float, floor_s: float) -> bool:
    """Whether prompts of such a cost take no time of their own: products that `line` tells of are hidden.

    It must have seen more than that: else nothing would be known of more.
    """
    if NEAR * cost > line.reach:
        return False
    return line.pace * line.slope_s * cost <= FEW * read_s or line.at(cost) <= read_s + BELOW * floor_s
