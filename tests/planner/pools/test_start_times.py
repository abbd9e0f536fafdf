"""How long workers take to start, as was seen."""

from __future__ import annotations

from diptych.planner.pools.start_times import StartTimes
from diptych.planner.values import WorkerState

PENDING, STARTING, READY = WorkerState.PENDING, WorkerState.STARTING, WorkerState.READY


def test_the_usual_start_is_the_median_of_those_that_were_seen_from_their_beginning() -> None:
    times = StartTimes()
    times.look(0.0, {"old": STARTING})
    times.look(15.0, {"old": READY, "a": PENDING})
    assert times.usual_s(60.0) == 60.0
    times.look(30.0, {"old": READY, "a": STARTING, "b": STARTING, "never": PENDING})
    times.look(45.0, {"old": READY, "a": READY, "b": STARTING})
    assert times.usual_s(20.0) == 30.0
    assert times.usual_s(60.0) == 60.0
    for now_s in (60.0, 300.0):
        times.look(now_s, {"old": READY, "a": READY, "b": READY if now_s > 60 else STARTING})
    assert times.usual_s(60.0) == 150.0  # of 30 and 270


def test_one_that_is_ready_at_once_tells_nothing() -> None:
    times = StartTimes()
    times.look(0.0, {})
    times.look(15.0, {"a": READY})
    assert times.usual_s(60.0) == 60.0
