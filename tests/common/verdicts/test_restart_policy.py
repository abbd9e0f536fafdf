from __future__ import annotations

import pytest

from diptych.common.verdicts.restart_policy import GiveUp, Restart, RestartPolicy

POLICY = RestartPolicy(max_deaths=5, window_s=30.0, first_delay_s=0.2, max_delay_s=1.0)


@pytest.mark.parametrize(
    ("deaths_s", "decision"),
    [
        ([7.0], Restart(0.2)),
        ([7.0, 8.0], Restart(0.4)),
        ([7.0, 8.0, 9.0], Restart(0.8)),
        ([7.0, 8.0, 9.0, 10.0], Restart(1.0)),
        ([7.0, 8.0, 9.0, 10.0, 36.9], GiveUp(5, 30.0)),
        ([7.0, 8.0, 9.0, 10.0, 37.0], Restart(1.0)),
        ([7.0, 8.0, 9.0, 10.0, 100.0], Restart(0.2)),
    ],
)
def test_deaths_within_the_window_delay_the_restart_and_then_forbid_it(
    deaths_s: list[float], decision: Restart | GiveUp
) -> None:
    assert POLICY.decide(deaths_s) == decision
