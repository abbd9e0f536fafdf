from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.schedule.kv_forecast import FIRST_GUESS, MEMORY, OutputLengths

ENOUGH = 100_000


def learned(*lengths: int) -> OutputLengths:
    made = OutputLengths()
    for length in lengths:
        made.observe(length)
    return made


def remaining(lengths: OutputLengths, made: int, limit: int = ENOUGH) -> int:
    return int(lengths.remaining(np.array([made]), np.array([limit]))[0])


def test_before_anything_is_known_a_guess_is_made_and_then_doubled() -> None:
    assert [remaining(OutputLengths(), made) for made in (0, 10, 1000)] == [FIRST_GUESS, FIRST_GUESS, 1000]


@pytest.mark.parametrize("length", [1, 7, 50, 1000])
def test_outputs_are_expected_to_be_as_long_as_they_were(length: int) -> None:
    assert length <= remaining(learned(*[length] * 20), 0) <= 1.25 * length + 1


def test_a_request_that_outlived_the_short_ones_is_expected_to_be_long() -> None:
    lengths = learned(*[10] * 90, *[500] * 10)
    assert remaining(lengths, 0) <= 13
    assert 450 <= remaining(lengths, 50) <= 600


def test_more_than_the_limit_is_never_expected_and_at_least_one_token_always() -> None:
    lengths = learned(*[500] * 20)
    assert remaining(lengths, 0, limit=30) == 30
    assert remaining(lengths, 499) >= 1
    assert remaining(lengths, 5000, limit=5001) == 1


def test_what_was_long_ago_counts_less() -> None:
    lengths = learned(*[1000] * 50, *[10] * (3 * MEMORY))
    assert remaining(lengths, 0) <= 13


def test_requests_are_foreseen_all_at_once() -> None:
    lengths = learned(*[100] * 20)
    assert lengths.remaining(np.array([0, 90]), np.array([ENOUGH, 95])).tolist() == [remaining(lengths, 0), 5]
