"""Pages are loaded only when that is faster than computing them."""

from __future__ import annotations

import math

import pytest

from diptych.engine.cache.worth_loading import worth_loading


@pytest.mark.parametrize(
    ("load_s", "compute_s", "expected"),
    [(0.1, 0.2, True), (0.2, 0.1, False), (0.1, 0.1, False), (math.inf, math.inf, False), (1.0, math.inf, True)],
)
def test_pages_are_loaded_only_if_that_is_faster_than_computing_them(
    load_s: float, compute_s: float, expected: bool
) -> None:
    assert worth_loading(load_s, compute_s) is expected
