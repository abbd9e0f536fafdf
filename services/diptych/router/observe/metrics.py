"""The router's metrics, in a registry of their own. Durations in seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diptych.common.build_info import tell_version
from diptych.common.members.roles import WORKER_ROLES, LegKind, Role
from diptych.common.refusals import Refusals
from diptych.generation.output import FailureCode
from diptych.router.admission.queue import Reason
from diptych.router.observe.pool_metrics import PoolMember, PoolMetrics
from diptych.v1.worker_pb2 import LegStats

LATENCY_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ANSWER_BUCKETS: Final = (*LATENCY_BUCKETS, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)  # of whole answers
GAP_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0, 5.0)
RATIO_BUCKETS: Final = (0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
STAGE_BUCKETS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class FleetCounts(Protocol):
    """What is counted of the workers."""

    def num_open_legs(self, role: Role) -> int: ...

    def num_cached_pages(self, role: Role) -> int: ...

    def num_in_sync(self, role: Role) -> int: ...

    @property
    def prefix_index_bytes(self) -> int: ...

    def pool_members(self) -> Iterable[PoolMember]: ...


class AdmissionCounts(Protocol):
    """What is counted of the requests that this router has."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class RouterMetrics:
    """What the router counts and measures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refusals = Refusals()  # of what only operators may do
        self.registry.register(self.refusals)
        tell_version(self.registry)
        self._add_counters()
        self._add_histograms()
        self._add_gauges()

    def _add_gauges(self) -> None:
        def gauge(name: str, words: str, *labels: str) -> Gauge:
            return Gauge(f"diptych_router_{name}", words, labels, registry=self.registry)

        self._legs_open = gauge("legs_open", "Legs that workers have not ended yet", "role")
        self._cached_pages = gauge("cached_pages", "Pages that workers have cached, as known", "role")
        self._kv_in_sync = gauge("kv_in_sync", "Workers whose cached pages are all known", "role")
        self._prefix_index_bytes = gauge("prefix_index_bytes", "Memory of what is known of cached pages")
        self._running = gauge("requests_running", "Requests that were admitted and have not ended")
        self._breakers_open = gauge("breakers_open", "Workers and links left alone for a while")
        self._waiting = gauge("requests_waiting", "Requests in line for admission")

    def _add_counters(self) -> None:
        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"diptych_router_{name}", words, labels, registry=self.registry)

        self.requests = counter("requests", "Requests that ended, by API and outcome", "api", "outcome")
        self.turned_away = counter("turned_away", "Requests refused for lack of room or time, by reason", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in a prefill worker's prefix cache")
        self.output_tokens = counter("output_tokens", "Output tokens of finished requests")
        self.attempts = counter("attempts", "Attempts begun, by policy and number of workers", "policy", "workers")
        self.retries = counter("retries", "Attempts that failed and were tried again, by reason", "reason")
        self.handed_back = counter("handed_back", "Attempts that a leaving worker handed back, done elsewhere")
        self.kv_resyncs = counter("kv_resyncs", "Times a worker was asked for all its cached pages, after a gap")
        self.hedges = counter("hedges", "Second attempts beside one that was slow to answer")
        self.replays = counter("replays", "Retries that continued after tokens had been sent")

    def _add_histograms(self) -> None:
        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"diptych_router_{name}_seconds", words, labels, buckets=buckets, registry=self.registry)

        self.ttft = histogram("ttft", "Arrival to the first output token", LATENCY_BUCKETS)
        self.itl = histogram("itl", "Gap between two arrivals of output tokens of a request", GAP_BUCKETS)
        self.e2e = histogram("e2e", "Arrival to the end of a finished request", ANSWER_BUCKETS)
        self.ttft_ratio = Histogram(
            "diptych_router_ttft_ratio",
            "Time to the first token against what was expected when its request was dispatched",
            buckets=RATIO_BUCKETS,
            registry=self.registry,
        )
        stages = histogram("stage", "Time in each stage of a request", STAGE_BUCKETS, "stage")
        self.admit = stages.labels("admit")
        self.prepare = stages.labels("prepare")
        self.select = stages.labels("select")
        self.dispatch = stages.labels("dispatch")
        self.first_token = stages.labels("first_token")
        self.respond = stages.labels("respond")
        self._prefill_queue = stages.labels("prefill_queue")
        self._prefill_compute = stages.labels("prefill_compute")
        self._prefill_transfer = stages.labels("prefill_transfer")
        self._decode_queue = stages.labels("decode_queue")
        self._decode_transfer = stages.labels("decode_transfer")
        self._decode_join = stages.labels("decode_join")

    def watch(self, fleet: FleetCounts, admission: AdmissionCounts) -> None:
        """Read these gauges from their owners whenever somebody asks."""
        for role in WORKER_ROLES.values():
            self._legs_open.labels(role.value).set_function(functools.partial(fleet.num_open_legs, role))
            self._cached_pages.labels(role.value).set_function(functools.partial(fleet.num_cached_pages, role))
            self._kv_in_sync.labels(role.value).set_function(functools.partial(fleet.num_in_sync, role))
        self._prefix_index_bytes.set_function(lambda: fleet.prefix_index_bytes)
        self._running.set_function(lambda: admission.num_running)
        self._waiting.set_function(lambda: admission.num_waiting)
        self.registry.register(PoolMetrics(fleet.pool_members))

    def watch_breakers(self, num_open: Callable[[], int]) -> None:
        """Read how many breakers are open whenever somebody asks."""
        self._breakers_open.set_function(num_open)

    def turned_away_for(self, reason: Reason) -> None:
        """A request is refused because the platform is too busy for it."""
        self.turned_away.labels(reason.value).inc()

    def went_on(self, code: FailureCode) -> None:
        """A request is tried again on another pair."""
        if code is FailureCode.HANDED_BACK:
            self.handed_back.inc()
        else:
            self.retries.labels(code.name.lower()).inc()

    def leg_finished(self, leg: LegKind, stats: LegStats) -> None:
        """Take the stage times that a worker measured for a leg that ended well."""
        for stage, duration_us in self._stages(leg, stats):
            stage.observe(duration_us / 1e6)

    def _stages(self, leg: LegKind, stats: LegStats) -> Iterable[tuple[Histogram, int]]:
        if leg is LegKind.DECODE:
            return (
                (self._decode_queue, stats.queue_us),
                (self._decode_transfer, stats.transfer_us),
                (self._decode_join, stats.join_us),
            )
        computed = ((self._prefill_queue, stats.queue_us), (self._prefill_compute, stats.compute_us))
        return computed if leg is LegKind.LOCAL else (*computed, (self._prefill_transfer, stats.transfer_us))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
