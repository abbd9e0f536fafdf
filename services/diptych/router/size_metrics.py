"""What finished requests were like, by how many tokens of their prompts had to be computed.

A planner goes by them: means over all requests hide that some prompts are found cached as good as whole, and others not
at all. There is a size for each factor of four.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

SIZES_NAME: Final = "diptych_router_by_new_tokens"
OF: Final = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")


def size_of(new_tokens: int) -> int:
    """Return the size of a prompt of which so many tokens are computed: the fewest that have it."""
    return 1 << 2 * (max(1, new_tokens).bit_length() // 2) >> 1 or 1


class SizeMetrics(Collector):
    """Sums of the event loop's, which need no lock: others only read them."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}

    def add(self, prompt_len: int, cached_tokens: int, output_tokens: int) -> None:
        """A request has finished."""
        size = size_of(prompt_len - cached_tokens)
        sums = self._sums.get(size)
        if sums is None:
            sums = self._sums[size] = [0.0] * len(OF)
        sums[0] += 1
        sums[1] += prompt_len
        sums[2] += cached_tokens
        sums[3] += output_tokens

    def collect(self) -> Iterator[Metric]:
        words = "Finished requests and their tokens, by the fewest tokens to compute that prompts of their size have"
        family = CounterMetricFamily(SIZES_NAME, words, labels=("new", "of"))
        for size, sums in sorted(self._sums.copy().items()):
            for of, value in zip(OF, sums, strict=True):
                family.add_metric([str(size), of], value)
        yield family
