"""Pages are loaded only when that is faster than computing them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.engine.cache.worth_loading import TierPrices, worth_loading
from diptych.engine.values.core_report import TierPrice


@pytest.mark.parametrize(
    ("load_s", "compute_s", "expected"),
    [(0.1, 0.2, True), (0.2, 0.1, False), (0.1, 0.1, False), (math.inf, math.inf, False), (1.0, math.inf, True)],
)
def test_pages_are_loaded_only_if_that_is_faster_than_computing_them(
    load_s: float, compute_s: float, expected: bool
) -> None:
    assert worth_loading(load_s, compute_s) is expected


@pytest.mark.parametrize(("base_s", "many_s", "told"), [(0.01, 0.0084, (0.01, 0.0)), (math.inf, 0.01, (math.inf, 0.0))])
def test_what_readers_finish_between_two_looks_makes_no_price_below_0(
    base_s: float, many_s: float, told: tuple[float, float]
) -> None:
    tier: Any = SimpleNamespace(name="files", restore_s=lambda num_places: many_s if num_places else base_s)
    assert TierPrices([tier], 16).at(0.0, 0, lambda start, end: 1.0) == (TierPrice("files", *told),)
