"""What is counted of requests, as Prometheus reads it."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from diptych.router.metrics import QuickHistogram

BOUNDS = (0.001, 0.01, 0.1, 1.0)


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.001, 0.0011, 0.1, 0.5, 1.0, 1.5, math.inf])
def test_an_observation_is_counted_in_the_bucket_in_which_prometheus_own_histogram_counts_it(value: float) -> None:
    pages = []
    for kind in (Histogram, QuickHistogram):
        registry = CollectorRegistry()
        histogram = kind("seconds", "words", ["stage"], buckets=BOUNDS, registry=registry)
        for each in (value, 0.02):
            histogram.labels("of_all").observe(each)
        lines = generate_latest(registry).decode().splitlines()
        pages.append([line for line in lines if "_created" not in line])
    assert pages[0] == pages[1]
