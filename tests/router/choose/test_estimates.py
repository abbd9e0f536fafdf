from __future__ import annotations

import math
import random

import pytest

from diptych.router.choose.estimates import PRIOR_DECODE, PRIOR_OUTPUT_LEN, PRIOR_PREFILL, UNKNOWN_USUAL, Estimates
from diptych.router.choose.fits import MEMORY, Line


@pytest.fixture
def estimates() -> Estimates:
    return Estimates()


def test_nothing_measured_is_the_prior(estimates: Estimates) -> None:
    learned = estimates.of(1)
    assert (learned.prefill, learned.decode, estimates.are_measured) == (PRIOR_PREFILL, PRIOR_DECODE, False)
    assert estimates.output_len == PRIOR_OUTPUT_LEN


def test_what_was_measured_last_counts_most(estimates: Estimates) -> None:
    for speed in (1e-4, 1e-3):
        for step in range(3 * MEMORY):
            estimates.prefilled(1, 100 + step % 7 * 100, 0, (100 + step % 7 * 100) * speed)
    assert estimates.of(1).prefill.slope == pytest.approx(1e-3, rel=0.1)


def test_a_new_worker_is_taken_for_the_mean_of_the_others(estimates: Estimates) -> None:
    for tokens in (100, 1000, 2000, 3000, 4000):
        estimates.prefilled(1, tokens, 0, tokens * 1e-3)
        estimates.decoded(2, tokens, 0.01 + tokens * 1e-6)
    fresh = estimates.of(9)
    assert estimates.are_measured
    assert fresh.prefill[:2] == pytest.approx((0.0, 1e-3), abs=1e-6)
    assert fresh.decode == pytest.approx((0.01, 1e-6))


def test_one_slow_moment_does_not_keep_requests_away_and_a_slow_worker_is_found_out(estimates: Estimates) -> None:
    for _ in range(100):
        estimates.prefilled(1, 1000, 0, 1.0)
        estimates.prefilled(2, 1000, 0, 1.0)
    estimates.prefilled(2, 1000, 0, 3.0)
    assert estimates.of(2).prefill.at(1000) == pytest.approx(1.0, rel=0.05)
    for _ in range(100):
        estimates.prefilled(1, 1000, 0, 1.0)
        estimates.prefilled(2, 1000, 0, 3.0)
    assert estimates.of(2).prefill.at(1000) > 1.4 * estimates.of(1).prefill.at(1000)


@pytest.mark.parametrize("factor", [3000.0, 1 / 3000])
def test_one_absurd_measurement_changes_little_of_what_is_expected_of_others(
    estimates: Estimates, factor: float
) -> None:
    usual, absurd = [10 + step * 37 % 300 for step in range(4 * MEMORY)], 200
    for tokens in usual:
        estimates.prefilled(1, tokens, 0, 0.01 + tokens * 1e-3)
        estimates.decoded(1, tokens, 0.01 + tokens * 1e-5)
        estimates.transferred(1, 2, tokens * 1e-4, tokens * 1e-4)
    before = estimates.of(9)
    estimates.prefilled(1, absurd, 0, 0.2 * factor)
    estimates.decoded(1, absurd, 0.01 * factor)
    estimates.transferred(1, 2, 0.02, 0.02 * factor)
    after = estimates.of(9)
    for tokens in (50, 150, 300):
        assert after.prefill.at(tokens) == pytest.approx(before.prefill.at(tokens), rel=0.1)
        assert after.decode.at(tokens) == pytest.approx(before.decode.at(tokens), rel=0.1)
        assert after.transfer.at(tokens * 1e-4) == pytest.approx(before.transfer.at(tokens * 1e-4), rel=0.15)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_change_that_lasts_is_learned(estimates: Estimates, factor: float) -> None:
    for scale in (1.0, factor):
        for step in range(6 * MEMORY):
            tokens = 10 + step * 37 % 300
            estimates.prefilled(1, tokens, 0, scale * tokens * 1e-3)
            estimates.decoded(1, tokens, scale * 0.01)
    learned = estimates.of(9)
    assert (learned.prefill.at(200), learned.decode.at(200)) == pytest.approx((factor * 0.2, factor * 0.01), rel=0.1)


def test_a_worker_that_was_slow_long_ago_gets_another_chance(estimates: Estimates) -> None:
    for _ in range(50):
        estimates.prefilled(1, 1000, 0, 1.0)
        estimates.prefilled(2, 1000, 0, 5.0)
    assert estimates.of(2).prefill.at(1000) > 1.4 * estimates.of(1).prefill.at(1000)
    for _ in range(3000):
        estimates.prefilled(1, 1000, 0, 1.0)
    assert estimates.of(2).prefill.at(1000) == pytest.approx(1.0, rel=0.1)


def test_a_worker_that_is_gone_is_forgotten_but_not_what_the_fleet_learned(estimates: Estimates) -> None:
    estimates.prefilled(1, 1000, 0, 5.0)
    estimates.transferred(1, 2, 0.2, 0.1)
    assert estimates.of(1).link(2).at(0.2) == pytest.approx(0.1)
    estimates.forget(1)
    assert estimates.of(1).links == {}
    assert estimates.of(1).transfer.at(0.2) == pytest.approx(0.1)
    assert estimates.of(1).prefill.at(1000) == pytest.approx(5.0)


def test_only_links_that_clearly_differ_are_told_and_none_to_a_worker_that_is_gone(estimates: Estimates) -> None:
    for _ in range(100):
        for peer_id in range(2, 12):
            estimates.transferred(1, peer_id, 0.1, 0.4 if peer_id == 5 else 0.1)
    learned = estimates.of(1)
    assert learned.link(2) == learned.transfer
    assert learned.links.keys() == {5}
    assert learned.link(5).at(0.1) > 1.4 * learned.transfer.at(0.1)
    estimates.forget(5)
    assert estimates.of(1).links == {}
    estimates.transferred(1, 5, 0.1, 0.4)  # it comes back, and is as new
    assert estimates.of(1).links == {}


def test_waits_for_pages_and_output_lengths_are_means(estimates: Estimates) -> None:
    for value in (1.0, 2.0):
        estimates.granted(1, value)
        estimates.ended(int(value) * 100)
    assert estimates.of(1).grant_wait_s == pytest.approx(1.5, abs=0.01)
    assert estimates.output_len == pytest.approx(150, abs=1)


def test_what_took_no_time_may_take_some_later(estimates: Estimates) -> None:
    estimates.decoded(1, 2, 0.0)
    assert estimates.of(1).decode == Line(0.0, 0.0)
    estimates.decoded(2, 2, 1.0)
    assert estimates.of(2).decode.at(2) == pytest.approx(0.5, rel=0.02)


def test_a_delay_that_the_speed_of_links_does_not_explain_is_the_same_on_all(estimates: Estimates) -> None:
    for _ in range(4):
        estimates.transferred(1, 2, 0.002, 0.02)  # a fast link, on a busy machine
    assert estimates.of(9).transfer == pytest.approx((0.018, 1.0))
    assert estimates.of(9).transfer.at(0.06) == pytest.approx(0.078)  # a link that was slow when tested


def test_what_is_usual_is_the_mean_of_what_came_lately(estimates: Estimates) -> None:
    assert estimates.usual == UNKNOWN_USUAL
    assert estimates.usual.crowd == 0
    for step in range(8 * MEMORY):
        estimates.came(0.1 * step, 0.25 if step % 2 else 0.75)
        estimates.prefilled(1, 100, 300, 0.1 if step % 2 else 0.3)
        estimates.transferred(1, 2, 0.05, 0.01)
    usual = estimates.usual
    assert usual == pytest.approx((0.5, 0.2, 0.05, 3.0, 0.0, 10.0), rel=0.05)
    assert usual.crowd == pytest.approx(0.5 / 0.2 / (1 - 0.5), rel=0.1)
    assert usual.link_crowd == pytest.approx(0.5 / 0.2 / (1 - 0.125), rel=0.1)
    assert usual.reuse == 1.0


def test_a_quiet_night_says_nothing_of_how_many_come_in_the_morning(estimates: Estimates) -> None:
    for number in range(8 * MEMORY):
        estimates.came(0.5 * number, 0.0)
    assert estimates.usual.rate == pytest.approx(2.0)
    estimates.came(8 * 3600.0, 0.0)
    assert estimates.usual.rate == pytest.approx(2.0, rel=0.05)
    for number in range(8 * MEMORY):
        estimates.came(8 * 3600.0 + 5.0 * number, 0.0)
    assert estimates.usual.rate == pytest.approx(0.2, rel=0.05)


def test_another_load_is_noticed_within_some_dozens_of_requests(estimates: Estimates) -> None:
    for number in range(8 * MEMORY):
        estimates.came(0.02 * number, 0.0)
        estimates.ended(400)
    for number in range(40):
        estimates.came(20.0 + 0.125 * number, 0.0)
        estimates.ended(1000)
    assert estimates.usual.rate == pytest.approx(8.0, rel=0.25)
    assert estimates.output_len == pytest.approx(1000, rel=0.2)


def test_a_load_that_stays_is_not_taken_for_another_because_outputs_differ(estimates: Estimates) -> None:
    """Lengths as of chats: many short ones, a few very long. A mean of 64 of them is off by 16 %."""
    rng, errors = random.Random(1), []
    for number in range(6000):
        estimates.ended(round(rng.lognormvariate(math.log(300) - 0.72, 1.2)))
        if number > 4 * MEMORY:
            errors.append(estimates.output_len / 300 - 1)
    assert math.sqrt(sum(error * error for error in errors) / len(errors)) < 0.2


def test_workers_that_are_always_busy_have_a_price_too(estimates: Estimates) -> None:
    estimates.prefilled(1, 100, 0, 1.0)
    for _ in range(MEMORY):
        estimates.came(0.0, 1.0)
    assert 1 < estimates.usual.crowd < math.inf
