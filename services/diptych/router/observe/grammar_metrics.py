"""What became of the schemas, patterns and grammars of clients, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.grammars.checks import GrammarChecks


class GrammarUsage(Collector):
    """Reads the counts of the checks."""

    def __init__(self, checks: GrammarChecks) -> None:
        self._checks = checks

    def collect(self) -> Iterator[Metric]:
        words = "Schemas, patterns and grammars of requests, by what became of their check"
        checks = CounterMetricFamily("diptych_router_grammar_checks", words, labels=["outcome"])
        for outcome, count in sorted(self._checks.counts.items()):
            checks.add_metric([outcome], count)
        yield checks
        words = "Schemas, patterns and grammars that wait to be checked"
        yield GaugeMetricFamily("diptych_router_grammar_checks_waiting", words, self._checks.num_waiting)
