"""What the holders of API keys use, for Prometheus. Labels are the names of configured keys, hence bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.router.keys.caller import KeyHolder
from diptych.router.keys.callers import Callers

PREFIX = "diptych_router_key"


class KeyUsage(Collector):
    """Reads the counts of callers."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def collect(self) -> Iterator[Metric]:
        yield self._counter("calls", "Calls of the API within the limits of the key", lambda holder: holder.num_calls)
        yield self._counter("prompt_tokens", "Prompt tokens", lambda holder: holder.prompt_tokens)
        yield self._counter("output_tokens", "Output tokens, of requests that have ended", lambda h: h.output_tokens)
        running = GaugeMetricFamily(f"{PREFIX}_requests_running", "Requests that have not ended", labels=["key"])
        limited = CounterMetricFamily(f"{PREFIX}_limited", "Calls refused for a limit", labels=["key", "limit"])
        for name, holder in self._callers.holders.items():
            running.add_metric([name], holder.num_running)
            for limit, count in sorted(holder.refusals.items()):
                limited.add_metric([name, limit], count)
        refused = CounterMetricFamily(
            f"{PREFIX}_refusals", "Calls refused for their key or its lack", labels=["reason"]
        )
        for reason, count in sorted(self._callers.refusals.items()):
            refused.add_metric([reason], count)
        yield from (running, limited, refused)

    def _counter(self, name: str, words: str, value: Callable[[KeyHolder], float]) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}_{name}", f"{words}, by the name of the key", labels=["key"])
        for key, holder in self._callers.holders.items():
            family.add_metric([key], value(holder))
        return family
