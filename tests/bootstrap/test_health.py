"""The probes of a bootstrap replica."""

from __future__ import annotations

from diptych.bootstrap.main import STALL_S, BootstrapHealth
from diptych.common.verdicts.probes import Verdict


def test_a_replica_is_ready_at_once_and_says_for_how_long_it_has_been_up() -> None:
    now_s = 100.0
    health = BootstrapHealth(clock=lambda: now_s)
    assert health.probes.startup() == Verdict(True, "started")
    assert health.probes.ready() == Verdict(True, "serves, for 0 s")
    now_s += 12.0
    assert health.probes.ready() == Verdict(True, "serves, for 12 s")


def test_a_replica_whose_loop_hangs_is_dead() -> None:
    now_s = 100.0
    health = BootstrapHealth(clock=lambda: now_s)
    assert health.probes.live() == Verdict(True, "every loop runs")
    now_s += STALL_S + 1.0
    assert not health.probes.live().is_good
