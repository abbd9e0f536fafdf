"""Verdicts from facts."""

from __future__ import annotations

from diptych.common.verdicts.probes import Verdict, judge_loops


def test_loops_that_came_round_lately_are_live() -> None:
    assert judge_loops({"a": 0.0, "b": 2.0}, 2.0) == Verdict(True, "every loop runs")


def test_one_silent_loop_is_enough_and_is_named() -> None:
    assert judge_loops({"a": 0.1, "b": 2.5}, 2.0) == Verdict(False, "b has not come round for 2.5 s")
