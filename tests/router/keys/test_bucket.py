"""Allowances that refill."""

from __future__ import annotations

import pytest

from diptych.router.keys.bucket import Bucket


def test_a_minutes_allowance_is_there_at_once_and_refills_steadily() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 0.5) == pytest.approx(0.5)
    assert bucket.wait_s(1, 1.0) == 0.0


def test_it_never_holds_more_than_a_minutes_allowance() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(60, 3600.0)
    assert bucket.wait_s(1, 3600.0) == pytest.approx(1.0)


def test_what_was_overdrawn_is_made_up_for() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)
    assert bucket.wait_s(1, 31.0) == 0.0


def test_another_size_does_not_forgive_what_was_used() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(60, 0.0)
    bucket.resize(120, 0.0)
    assert bucket.wait_s(60, 0.0) == 0.0
    assert bucket.wait_s(61, 0.0) == pytest.approx(0.5)
