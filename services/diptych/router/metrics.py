"""The router's metrics, in a registry of their own. Durations in seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diptych.router.worker_view import Role
from diptych.v1.worker_pb2 import LegStats

LATENCY_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0, 5.0)
STAGE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class FleetCounts(Protocol):
    """What is counted of the workers."""

    def num_open_legs(self, role: Role) -> int: ...

    def num_cached_pages(self, role: Role) -> int: ...

    def num_in_sync(self, role: Role) -> int: ...


class RouterMetrics:
    """What the router counts and measures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_counters()
        self._add_histograms()
        self._legs_open = Gauge(
            "diptych_router_legs_open", "Legs that workers have not ended yet", ["role"], registry=self.registry
        )
        self._cached_pages = Gauge(
            "diptych_router_cached_pages", "Pages that workers have cached, as known", ["role"], registry=self.registry
        )
        self._kv_in_sync = Gauge(
            "diptych_router_kv_in_sync", "Workers whose cached pages are all known", ["role"], registry=self.registry
        )
        self._running = Gauge(
            "diptych_router_requests_running", "Requests that were admitted and have not ended", registry=self.registry
        )

    def _add_counters(self) -> None:
        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"diptych_router_{name}", words, labels, registry=self.registry)

        self.requests = counter("requests", "Requests that ended, by API and outcome", "api", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in a prefill worker's prefix cache")
        self.output_tokens = counter("output_tokens", "Output tokens of finished requests")
        self.retries = counter("retries", "Attempts that failed and were tried again, by reason", "reason")
        self.kv_resyncs = counter("kv_resyncs", "Times a worker was asked for all its cached pages, after a gap")
        self.replays = counter("replays", "Retries that continued after tokens had been sent")

    def _add_histograms(self) -> None:
        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"diptych_router_{name}_seconds", words, labels, buckets=buckets, registry=self.registry)

        self.ttft = histogram("ttft", "Arrival to the first output token", LATENCY_BUCKETS)
        self.itl = histogram("itl", "Gap between two arrivals of output tokens of a request", GAP_BUCKETS)
        self.e2e = histogram("e2e", "Arrival to the end of a finished request", LATENCY_BUCKETS)
        stages = histogram("stage", "Time in each stage of a request", STAGE_BUCKETS, "stage")
        self.prepare = stages.labels("prepare")
        self.select = stages.labels("select")
        self._prefill_queue = stages.labels("prefill_queue")
        self._prefill_compute = stages.labels("prefill_compute")
        self._prefill_transfer = stages.labels("prefill_transfer")
        self._decode_queue = stages.labels("decode_queue")
        self._decode_transfer = stages.labels("decode_transfer")
        self._decode_join = stages.labels("decode_join")

    def watch(self, fleet: FleetCounts, num_running: Callable[[], int]) -> None:
        """Read these gauges from their owners whenever somebody asks."""
        for role in Role:
            self._legs_open.labels(role.value).set_function(functools.partial(fleet.num_open_legs, role))
            self._cached_pages.labels(role.value).set_function(functools.partial(fleet.num_cached_pages, role))
            self._kv_in_sync.labels(role.value).set_function(functools.partial(fleet.num_in_sync, role))
        self._running.set_function(num_running)

    def leg_finished(self, role: Role, stats: LegStats) -> None:
        """Take the stage times that a worker measured for a leg that ended well."""
        if role is Role.PREFILL:
            self._prefill_queue.observe(stats.queue_us / 1e6)
            self._prefill_compute.observe(stats.compute_us / 1e6)
            self._prefill_transfer.observe(stats.transfer_us / 1e6)
        else:
            self._decode_queue.observe(stats.queue_us / 1e6)
            self._decode_transfer.observe(stats.transfer_us / 1e6)
            self._decode_join.observe(stats.join_us / 1e6)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
