"""When a device was done with a step, by its own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import pytest
import torch

from diptych.engine.runner.gpu.step_ends import REACH_S, StepEnds


@dataclass
class Clock:
    now_s: float = 100.0


@dataclass
class VirtualEnd:
    """Comes at a time of the clock. The device's clock began elsewhere."""

    clock: Clock
    at_s: float

    def query(self) -> bool:
        return self.clock.now_s >= self.at_s

    def synchronize(self) -> None:
        self.clock.now_s = max(self.clock.now_s, self.at_s)

    def elapsed_time(self, end_event: Self, /) -> float:
        return (end_event.at_s - self.at_s) * 1e3


def test_who_asks_late_hears_how_late() -> None:
    clock = Clock()
    ends = StepEnds(lambda: clock.now_s)
    assert ends.wait(VirtualEnd(clock, 100.25)) == 0.0
    clock.now_s = 100.5
    assert ends.wait(VirtualEnd(clock, 100.375)) == pytest.approx(0.125)
    assert ends.wait(VirtualEnd(clock, 100.4375)) == pytest.approx(0.0625)
    assert ends.wait(VirtualEnd(clock, 100.75)) == 0.0
    assert clock.now_s == 100.75


def test_nothing_is_said_where_no_end_was_waited_for_of_late() -> None:
    clock = Clock()
    ends = StepEnds(lambda: clock.now_s)
    assert ends.wait(VirtualEnd(clock, 99.0)) == 0.0
    ends.wait(VirtualEnd(clock, 101.0))
    clock.now_s = 101.5 + REACH_S
    assert ends.wait(VirtualEnd(clock, 101.25)) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ends_of_a_gpu_are_known_afterwards() -> None:
    ends = StepEnds()
    waited, missed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)  # cycles: so that it is waited for
    waited.record()
    assert ends.wait(waited) == 0.0
    missed.record()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    torch.cuda.synchronize()
    assert 0.0 < ends.wait(missed) < 1.0
