"""What a worker tells Prometheus of its load: the measures that its pool is scaled by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from diptych.common.members.instance_names import role_of
from diptych.common.members.worker_load import computable_tokens, kv_demand, kv_occupancy
from diptych.v1.worker_pb2 import WorkerStatus

LABELS: Final = ("dp_rank", "role", "pool")

Value = Callable[[WorkerStatus], float | None]  # None: not known


def load_families(statuses: Mapping[int, WorkerStatus]) -> Iterator[Metric]:
    """Yield one sample a scheduler of each measure, by data-parallel rank."""

    def family(kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, words: str, value: Value) -> Metric:
        metric = kind(f"diptych_worker_{name}", words, labels=LABELS)
        for rank, status in statuses.items():
            if (number := value(status)) is not None:
                metric.add_metric([str(rank), role_of(status.instance), status.instance.pool], number)
        return metric

    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield family(gauge, "prompt_tokens_waiting", "Prompt tokens that wait to be computed", _computable)
    yield family(gauge, "prefill_tokens_per_second", "Speed of computing prompts, of late", _speed)
    yield family(gauge, "prefill_backlog_seconds", "Time that the waiting prompt tokens take", prefill_backlog_s)
    yield family(counter, "prefill_seconds", "Time in steps that computed prompts", lambda s: s.prefill_s)
    yield family(gauge, "prefill_busy_ratio", "Share of such time, of late", lambda s: s.prefill_busy)
    yield family(gauge, "kv_occupancy_ratio", "KV pages that requests hold", lambda s: kv_occupancy(s.instance.load))
    yield family(gauge, "kv_demand_ratio", "The same with those that wait", lambda s: kv_demand(s.instance.load))
    yield family(gauge, "requests_running", "Requests with pages", lambda s: s.instance.load.num_running)
    yield family(gauge, "requests_waiting", "Requests that wait", lambda s: s.instance.load.num_waiting)


def prefill_backlog_s(status: WorkerStatus) -> float | None:
    """Return how long a worker will compute what waits; None while its speed is not known."""
    num_tokens = _computable(status)
    if not num_tokens:
        return 0.0
    return num_tokens / status.prefill_tokens_per_s if status.prefill_tokens_per_s else None


def _computable(status: WorkerStatus) -> int:
    return computable_tokens(status.instance.load)


def _speed(status: WorkerStatus) -> float | None:
    return status.prefill_tokens_per_s or None
