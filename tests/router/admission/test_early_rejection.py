from __future__ import annotations

import random

import pytest

from diptych.router.admission.ttft_gate import MATTERS_FROM, EarlyRejection


def taught(error: float, *, limit_s: float = 1.0) -> EarlyRejection:
    """What is learned when first tokens take `error` times as long as predicted, give or take a tenth."""
    rng, rejection = random.Random(7), EarlyRejection()
    for _ in range(1000):
        rejection.learn(0.5, 0.5 * error * rng.uniform(0.9, 1.1), limit_s)
    return rejection


def test_a_first_token_that_comes_in_time_is_not_late() -> None:
    rejection = EarlyRejection()
    assert (rejection.late_s(0.0, 0.9, 1.0), rejection.late_s(0.1, 0.9, 1.0)) == (0.0, 0.0)


def test_what_was_spent_before_counts() -> None:
    assert EarlyRejection().late_s(0.25, 1.0, 1.0) == 0.25


@pytest.mark.parametrize("error", [0.4, 1.0, 3.0])
def test_nearly_all_first_tokens_come_no_later_than_said(error: float) -> None:
    assert taught(error).factor == pytest.approx(error * 1.1, rel=0.1)


def test_small_predictions_teach_nothing() -> None:
    assert taught(50.0, limit_s=10.0).factor == 1.0


def test_a_client_with_a_tiny_limit_teaches_nothing() -> None:
    rejection = EarlyRejection()
    for _ in range(100):
        rejection.learn(0.001, 0.02, 0.001)
    assert rejection.factor == 1.0


@pytest.mark.parametrize("error", [0.0, 1000.0])
def test_some_requests_are_always_let_in_to_correct_it(error: float) -> None:
    rejection = taught(error)
    assert rejection.late_s(0.0, 0.99 * MATTERS_FROM, 1.0) == 0.0
    rejection.learn(0.5, 0.0, 1.0)
    rejection.learn(0.5, 9.0, 1.0)
    assert MATTERS_FROM <= rejection.factor <= 1 / MATTERS_FROM
