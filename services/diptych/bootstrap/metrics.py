"""Makes the metrics of a bootstrap replica: who is listed, and what has happened since its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.bootstrap.announcement import Said, instance_of
from diptych.bootstrap.census import Census
from diptych.bootstrap.standing import Standing
from diptych.common.build_info import tell_certificate, tell_version
from diptych.common.health.health import Page
from diptych.common.members.instance_names import role_of
from diptych.common.members.membership import Record
from diptych.common.refusals import Refusals
from diptych.common.trust.tls import Tls

PREFIX: Final = "diptych_bootstrap"


class BootstrapMetrics(Collector):
    """Asks for a census at each scrape."""

    def __init__(self, census: Callable[[], Census], refusals: Refusals, tls: Tls | None = None) -> None:
        self._census = census
        self._registry = CollectorRegistry()
        self._registry.register(refusals)
        tell_version(self._registry)
        tell_certificate(self._registry, tls)
        self._registry.register(self)

    def page(self) -> Page:
        return Page(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry))

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for a census."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        census = self._census()
        counts, moves = census.counts, census.counts.moves
        members = GaugeMetricFamily(f"{PREFIX}_members", "Instances that are listed", labels=["role", "state"])
        for (role, state), count in sorted(Counter(map(_role_and_state, census.listed)).items()):
            members.add_metric([role, state], count)
        yield members
        yield GaugeMetricFamily(f"{PREFIX}_watchers", "Who follows the membership", census.num_watchers)
        yield _counter("heartbeats", "Heartbeats taken", counts.heartbeats)
        yield _counter("refused_heartbeats", "Heartbeats that could not be, or had no place", counts.refused)
        yield _counter("expirations", "Instances whose lease ran out", moves[Standing.EXPIRED])
        yield _counter("evictions", "Instances whose address a newer one took", moves[Standing.EVICTED])
        yield _counter("goodbyes", "Instances that left", moves[Standing.GONE])
        yield _counter("mismatches", "Kinds of workers that turned out never to pair with others", counts.mismatches)


def _role_and_state(record: Record[Said]) -> tuple[str, str]:
    return role_of(instance_of(record)), record.state.name.lower()


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", words, value)
