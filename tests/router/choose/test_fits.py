from __future__ import annotations

import math
import random

import pytest

from diptych.router.choose.fits import Curve, CurveFit, Fit, Line

PRIOR = Line(0.005, 1e-4)


def test_a_line_is_found_in_noise() -> None:
    rng, fit = random.Random(1), Fit()
    for _ in range(500):
        tokens = rng.randrange(10, 4000)
        fit.learn(tokens, (0.02 + tokens * 1e-5) * rng.uniform(0.9, 1.1))
    line = fit.line(PRIOR)
    assert line.base == pytest.approx(0.02, rel=0.1)
    assert line.slope == pytest.approx(1e-5, rel=0.1)


def test_points_that_show_no_slope_scale_the_prior() -> None:
    fit = Fit()
    for _ in range(20):
        fit.learn(100, 0.3)
    assert fit.line(Line(0.01, 1e-4)) == pytest.approx((0.15, 15e-4))


@pytest.mark.parametrize("points", [[(1, 9.0), (2, 5.0), (3, 1.0)], [(1, 0.0), (2, 0.0), (3, 1.0)]])
def test_no_term_is_negative(points: list[tuple[float, float]]) -> None:
    fit = Fit()
    for x, y in points * 4:
        fit.learn(x, y)
    line = fit.line(PRIOR)
    assert line.base >= 0
    assert line.slope > 0


def measured(true: Curve, count: int = 200) -> CurveFit:
    """Prompts of up to 60,000 tokens, half of each cached or less, measured with an error of 5 %."""
    rng, fit = random.Random(2), CurveFit()
    for _ in range(count):
        prompt_len = rng.randrange(100, 60_000)
        cached_tokens = round(prompt_len * rng.uniform(0, 0.5))
        num_tokens = prompt_len - cached_tokens
        fit.learn(num_tokens, cached_tokens, true.at(num_tokens, cached_tokens) * rng.uniform(0.95, 1.05))
    return fit


@pytest.mark.parametrize("double", [math.inf, 50_000.0, 20_000.0, 5_000.0])
def test_context_makes_tokens_dearer_as_far_as_was_measured(double: float) -> None:
    true = Curve(0.01, 4e-5, double)
    found = measured(true).curve(Curve(*PRIOR))
    for num_tokens, cached_tokens in ((4_000, 0), (4_000, 40_000), (50_000, 0)):
        assert found.at(num_tokens, cached_tokens) == pytest.approx(true.at(num_tokens, cached_tokens), rel=0.25)


def test_a_line_stays_a_line() -> None:
    found = measured(Curve(0.01, 4e-5)).curve(Curve(*PRIOR))
    assert found.double == math.inf
    assert found.mean_slope == pytest.approx(4e-5, rel=0.1)


def test_a_usual_token_costs_what_tokens_cost_in_the_mean() -> None:
    true, total_s, total = Curve(0.0, 4e-5, 30_000.0), 0.0, 0
    fit = CurveFit()
    for num_tokens in (1_000, 5_000, 20_000, 40_000) * 5:
        fit.learn(num_tokens, 10_000, true.at(num_tokens, 10_000))
        total_s, total = total_s + true.at(num_tokens, 10_000), total + num_tokens
    assert fit.curve(Curve(*PRIOR)).mean_slope == pytest.approx(total_s / total, rel=0.1)


def test_without_measurements_a_curve_is_the_prior() -> None:
    assert CurveFit().curve(Curve(0.005, 1e-4)) == Curve(0.005, 1e-4)
