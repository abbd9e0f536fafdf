"""The measures by which pools of workers are scaled, as a router tells them to Prometheus.

They are sums over the workers that are ready, as they told their load and as fast as the router found them: every
router tells about the same.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.common.members.instances import computable_tokens, kv_demand, role_of
from diptych.common.members.record import State
from diptych.router.choose.fits import Curve
from diptych.v1.bootstrap_pb2 import Instance, WorkerLoad

POOL_PREFIX: Final = "diptych_router_pool"


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One instance, as it counts for its pool."""

    record: Instance
    load: WorkerLoad
    prefill: Curve  # seconds to compute prompts there

    @property
    def pool(self) -> tuple[str, str]:
        return role_of(self.record), self.record.pool

    @property
    def state(self) -> State:
        return State(self.record.state)

    @property
    def backlog_s(self) -> float:
        """How long it will compute what waits."""
        return self.prefill.mean_slope * computable_tokens(self.load)


class PoolMetrics(Collector):
    """Asks for the members at each scrape."""

    def __init__(self, members: Callable[[], Iterable[PoolMember]]) -> None:
        self._members = members

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for the members."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        members = tuple(self._members())
        workers = GaugeMetricFamily(f"{POOL_PREFIX}_workers", "Instances of a pool", labels=("role", "pool", "state"))
        for (pool, state), count in sorted(
            collections.Counter((member.pool, member.state) for member in members).items()
        ):
            workers.add_metric([*pool, state.name.lower()], count)
        yield workers
        ready = [member for member in members if member.state is State.READY]
        yield _sum("prefill_backlog_seconds", "Time that waiting prompt tokens take", ready, lambda m: m.backlog_s)
        yield _sum("kv_full_workers", "Sum of KV demands", ready, lambda m: kv_demand(m.load))
        yield _sum("requests_running", "Requests with pages", ready, lambda m: m.load.num_running)
        yield _sum("requests_waiting", "Requests that wait", ready, lambda m: m.load.num_waiting)


def _sum(name: str, words: str, members: Iterable[PoolMember], value: Callable[[PoolMember], float]) -> Metric:
    sums: dict[tuple[str, str], float] = {}
    for member in members:
        sums[member.pool] = sums.get(member.pool, 0.0) + value(member)
    family = GaugeMetricFamily(f"{POOL_PREFIX}_{name}", words, labels=("role", "pool"))
    for pool, total in sorted(sums.items()):
        family.add_metric(pool, total)
    return family
