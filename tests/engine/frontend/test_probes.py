"""A worker's probes, from facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.members.record import State
from diptych.common.verdicts.probes import Verdict
from diptych.engine.frontend.probes import InstanceFacts, live, ready, startup

SERVING = InstanceFacts(
    rank=0, is_loaded=True, state=State.READY, not_ready="", paused="", silent_s=0, num_routers=1, beat_s=10.0
)
LOADING = replace(SERVING, is_loaded=False, state=State.STARTING, num_routers=0, beat_s=None)


def test_a_slow_load_is_no_death() -> None:
    assert live([LOADING], frontend_beat_s=10.0, now_s=10.1, stall_s=1.0) == Verdict(True, "every loop runs")
    assert startup([LOADING], 3600.0) == Verdict(False, "loading the model, for 3600 s so far")
    assert ready([LOADING], 0) == Verdict(False, "the model is loading")


def test_a_worker_that_serves_passes_everything() -> None:
    assert live([SERVING], 10.0, 10.5, 1.0) == Verdict(True, "every loop runs")
    assert startup([SERVING], 3600.0) == Verdict(True, "loaded")
    assert ready([SERVING], 2) == Verdict(True, "takes requests")


def test_a_step_loop_or_a_frontend_that_hangs_is_death() -> None:
    assert live([SERVING], 12.0, 12.0, 1.0) == Verdict(False, "the step loop has not come round for 2.0 s")
    assert live([LOADING], 10.0, 12.0, 1.0) == Verdict(False, "the frontend has not come round for 2.0 s")


def test_every_instance_counts_and_the_one_at_fault_is_named() -> None:
    second = replace(SERVING, rank=1, beat_s=5.0, state=State.STARTING, not_ready="no peer is linked yet")
    of = "of data-parallel rank 1"
    assert live([SERVING, second], 10.0, 10.0, 1.0) == Verdict(
        False, f"the step loop {of} has not come round for 5.0 s"
    )
    assert ready([SERVING, second], 0) == Verdict(False, f"no peer is linked yet {of}")
    assert startup([SERVING, replace(LOADING, rank=1)], 1.0) == Verdict(
        False, f"loading the model {of}, for 1 s so far"
    )


@pytest.mark.parametrize(
    ("facts", "num_known_routers", "reason"),
    [
        (replace(SERVING, state=State.STARTING, not_ready="no peer is linked yet"), 0, "no peer is linked yet"),
        (
            replace(SERVING, num_routers=0),
            2,
            "no router has acknowledged this worker yet (known: 2)",
        ),
        (replace(SERVING, state=State.DRAINING), 0, "draining"),
        (replace(SERVING, silent_s=3, num_routers=0), 2, "the scheduler has been silent for 3 s"),
        (replace(SERVING, paused="its weights are replaced"), 0, "paused: its weights are replaced"),
    ],
)
def test_who_would_not_serve_says_why(facts: InstanceFacts, num_known_routers: int, reason: str) -> None:
    assert ready([facts], num_known_routers) == Verdict(False, reason)


def test_without_a_router_nobody_needs_to_acknowledge() -> None:
    assert ready([replace(SERVING, num_routers=0)], 0) == Verdict(True, "takes requests")
