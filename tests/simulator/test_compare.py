from __future__ import annotations

import numpy as np
import pytest

from diptych.simulator.compare import Times, compare

NAN = float("nan")


def times(ttft: list[float], tpot: list[float] | None = None) -> Times:
    """Calls at 0 s with outputs of 11 tokens."""
    first, gaps = np.array(ttft), np.array(tpot or [0.01] * len(ttft))
    return Times.of(np.zeros(len(first)), first, first + 10 * gaps, np.full(len(first), 11.0))


def test_times_follow_from_stamps_and_lengths() -> None:
    found = Times.of(np.array([1.0, 2.0]), np.array([1.5, 2.25]), np.array([2.5, 2.25]), np.array([5.0, 1.0]))
    assert found.ttft.tolist() == [0.5, 0.25]
    assert found.tpot.tolist() == [0.25, pytest.approx(NAN, nan_ok=True)]
    assert found.whole.tolist() == [1.5, 0.25]


def test_the_error_of_a_metric_is_that_of_medians_and_tails_of_configurations() -> None:
    measured = {"one": times([1.0, 1.0, 1.0]), "other": times([2.0, 2.0, 2.0])}
    simulated = {"one": times([1.1, 1.1, 1.1]), "other": times([1.9, 1.9, 1.9])}
    errors = compare(measured, simulated).errors("ttft")
    assert errors.median == pytest.approx(0.075)
    assert errors.p90 == pytest.approx(0.1)
    assert errors.bias == pytest.approx(0.025)


def test_pairs_of_configurations_are_in_order_or_not() -> None:
    measured = {name: times([ttft]) for name, ttft in zip("abc", (1.0, 2.0, 3.0), strict=True)}
    simulated = {name: times([ttft]) for name, ttft in zip("abc", (1.0, 4.0, 3.5), strict=True)}
    errors = compare(measured, simulated).errors("ttft")
    assert errors.order == pytest.approx(2 / 3)
    assert errors.num_pairs == 6  # three by medians, three by tails
    assert compare(measured, simulated).errors("tpot").num_pairs == 0  # nothing tells them apart


def test_calls_that_one_side_did_not_serve_are_counted_and_left_out() -> None:
    measured, simulated = {"a": times([1.0, NAN, 3.0])}, {"a": times([1.0, 2.0, NAN])}
    found = compare(measured, simulated)
    assert found.num_unserved == (1, 1)
    assert found.errors("ttft").p90 == 0.0
    assert compare({"a": times([NAN])}, simulated).figures == []
    with pytest.raises(KeyError):
        compare({"a": times([NAN])}, {"a": times([1.0])}).errors("ttft")
