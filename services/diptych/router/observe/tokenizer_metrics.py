"""How much of the prompts was known, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.tokens.segment_cache import SegmentCache


class TokenizerUsage(Collector):
    """Reads the counts of a cache of tokens."""

    def __init__(self, cache: SegmentCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        words = "Characters of prompts, by whether their tokens were remembered"
        chars = CounterMetricFamily("diptych_router_prompt_chars", words, labels=["known"])
        chars.add_metric(["true"], self._cache.known_chars)
        chars.add_metric(["false"], self._cache.new_chars)
        yield chars
        name, words = "diptych_router_tokenizer_cache_bytes", "Memory that remembered tokens take"
        yield GaugeMetricFamily(name, words, self._cache.num_bytes)
