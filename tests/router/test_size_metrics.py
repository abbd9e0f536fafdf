"""Requests by how many tokens of their prompts were computed."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from diptych.router.size_metrics import OF, SizeMetrics, size_of


def test_a_size_is_a_factor_of_four() -> None:
    tokens = (-5, 0, 1, 2, 7, 8, 31, 32, 127, 128, 100_000)
    assert [size_of(each) for each in tokens] == [1, 1, 1, 2, 2, 8, 8, 32, 32, 128, 32_768]


def test_hits_and_misses_are_counted_apart() -> None:
    sizes, registry = SizeMetrics(), CollectorRegistry()
    registry.register(sizes)
    for used in ((1000, 990, 5), (1000, 980, 7), (1000, 0, 9)):
        sizes.add(*used)

    def told(size: str) -> list[float | None]:
        return [
            registry.get_sample_value("diptych_router_by_new_tokens_total", {"new": size, "of": each}) for each in OF
        ]

    assert told("8") == [2, 2000, 1970, 12]
    assert told("512") == [1, 1000, 0, 9]
    assert told("32") == [None] * 4
