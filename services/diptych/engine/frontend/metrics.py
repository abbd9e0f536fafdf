"""Tells Prometheus of a worker's KV transfers, and of its load, by which its pool is scaled. Durations in seconds.

What schedulers count is asked of them when somebody scrapes; what happens once a request is taken from its last output.
Nothing is done for a step or a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.common.build_info import tell_certificate, tell_version
from diptych.common.members.instances import computable_tokens, kv_demand, kv_occupancy, role_of
from diptych.common.members.membership import State
from diptych.common.refusals import Refusals
from diptych.common.trust.tls import Tls
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.kvtransfer.layout import layout_from_wire
from diptych.v1.worker_pb2 import LINK_STATE_UP, Drain, LegStats, LinkStatus, WorkerStatus

TRANSFER_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

COUNTERS: Final[Sequence[tuple[str, str, Callable[[WorkerStatus], int]]]] = (  # what a scheduler counts since its start
    ("integrity_failures", "Hand-offs whose bytes were wrong; must be 0", lambda s: s.integrity_failures),
    ("link_failures", "Links to peers that broke or failed their test", lambda s: s.link_failures),
    ("unauthenticated_messages", "Transfer messages without our link key", lambda s: s.unauthenticated_messages),
    ("refused_page_writes", "Transfer messages for pages not granted", lambda s: s.refused_page_writes),
    ("retractions", "Requests that had to give up their pages for a while", lambda s: s.retractions),
)

Statuses = Mapping[int, WorkerStatus | None]  # by data-parallel rank; None: its scheduler does not answer
LABELS: Final = ("dp_rank", "role", "pool")

Value = Callable[[WorkerStatus], float | None]  # None: not known
ANSWER_S: Final = 2.0  # that a scheduler gets; it answers between two steps


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._registry = CollectorRegistry()
        self.refusals = Refusals()  # of the gRPC server
        self._registry.register(self.refusals)
        tell_version(self._registry)
        tell_certificate(self._registry, tls)
        self._transfer = Histogram(
            "diptych_kv_transfer_seconds",
            "A request's KV on its way: first token to acknowledgement (prefill), grant to hand-off (decode)",
            buckets=TRANSFER_BUCKETS,
            registry=self._registry,
        )
        self._added_ttft = Histogram(
            "diptych_kv_transfer_added_ttft_seconds",
            "What handing over its KV adds to a request: first token computed to decode's acknowledgement (prefill)",
            buckets=TRANSFER_BUCKETS,
            registry=self._registry,
        )

    def leg_ended(self, stats: LegStats) -> None:
        """Take what a worker measured for a leg that ended well."""
        if stats.pages_moved:
            self._transfer.observe(stats.transfer_us / 1e6)
        if stats.added_ttft_us:
            self._added_ttft.observe(stats.added_ttft_us / 1e6)

    def exposition(self, statuses: Statuses) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(_Families(statuses))


class _Families(Collector):
    """The families of one scrape, in place of a registry of lasting ones."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        return families(self._statuses)


def families(statuses: Statuses) -> Iterator[Metric]:
    """Yield what schedulers said of themselves, one sample a scheduler or link."""
    up = GaugeMetricFamily("diptych_worker_up", "Whether a scheduler answers", labels=["dp_rank"])
    for rank, status in statuses.items():
        up.add_metric([str(rank)], status is not None)
    yield up
    answered = {rank: status for rank, status in statuses.items() if status is not None}
    yield from _drain_families(answered)
    yield from load_families(answered)
    yield from _scheduler_families(answered)
    yield from _link_families([(rank, link) for rank, status in answered.items() for link in status.links])


def _drain_families(statuses: Mapping[int, WorkerStatus]) -> Iterator[Metric]:
    state = GaugeMetricFamily("diptych_worker_state", "1 for the state of an instance", labels=["dp_rank", "state"])
    left = GaugeMetricFamily("diptych_worker_drain_requests_left", "Open requests of a drain", labels=["dp_rank"])
    oldest = GaugeMetricFamily("diptych_worker_drain_oldest_seconds", "Age of the oldest of them", labels=["dp_rank"])
    for rank, status in statuses.items():
        state.add_metric([str(rank), state_of(status)], 1)
        if status.HasField("drain"):
            left.add_metric([str(rank)], status.drain.requests_left)
            oldest.add_metric([str(rank)], status.drain.oldest_s)
    yield from (state, left, oldest)


def state_of(status: WorkerStatus) -> str:
    """Return "starting", "ready", "paused", "draining" or "empty"."""
    if status.drain.phase == Drain.PHASE_EMPTY:
        return "empty"
    return "paused" if status.instance.paused else State(status.instance.state).name.lower()


def _scheduler_families(statuses: Mapping[int, WorkerStatus]) -> Iterator[Metric]:
    for name, words, value in COUNTERS:
        family = CounterMetricFamily(f"diptych_kv_{name}", words, labels=["dp_rank"])
        for rank, status in statuses.items():
            family.add_metric([str(rank)], value(status))
        yield family
    yield _transfer_bytes(statuses)
    guarded = GaugeMetricFamily(
        "diptych_kv_listener_guarded", "1 where strangers get no connection of the transfer library", labels=["dp_rank"]
    )
    leaks = GaugeMetricFamily(
        "diptych_kv_leaks_found", "Contradictions in the books of KV pages; must be 0", labels=["dp_rank"]
    )
    pages = GaugeMetricFamily("diptych_kv_pages", "KV pages by state", labels=["dp_rank", "state"])
    oldest = GaugeMetricFamily(
        "diptych_kv_quarantine_oldest_seconds", "Age of the oldest page in quarantine", labels=["dp_rank"]
    )
    for rank, status in statuses.items():
        for state, count in sorted(status.pages_by_state.items()):
            pages.add_metric([str(rank), state], count)
        oldest.add_metric([str(rank)], status.quarantine_oldest_s)
        leaks.add_metric([str(rank)], status.leaks_found)
        guarded.add_metric([str(rank)], not status.kv_port_open)
    yield from (leaks, pages, oldest, guarded)
    yield from _graph_families(statuses)


def _graph_families(statuses: Mapping[int, WorkerStatus]) -> Iterator[Metric]:
    graphs = GaugeMetricFamily("diptych_gpu_graphs", "Sizes of steps that are captured", labels=["dp_rank"])
    nbytes = GaugeMetricFamily("diptych_gpu_graph_bytes", "GPU memory that these took", labels=["dp_rank"])
    for rank, status in statuses.items():
        graphs.add_metric([str(rank)], status.graphs)
        nbytes.add_metric([str(rank)], status.graph_bytes)
    yield from (graphs, nbytes)


def _transfer_bytes(statuses: Mapping[int, WorkerStatus]) -> Metric:
    family = CounterMetricFamily(
        "diptych_kv_transfer_bytes", "KV that was sent to or received from peers", labels=["dp_rank", "direction"]
    )
    for rank, status in statuses.items():
        page_nbytes = layout_from_wire(status.instance.transfer.layout).page_nbytes
        family.add_metric([str(rank), "sent"], status.pages_sent * page_nbytes)
        family.add_metric([str(rank), "received"], status.pages_received * page_nbytes)
    return family


def _link_families(links: Sequence[tuple[int, LinkStatus]]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "diptych_kv_link_info",
        "1 for each link that is up, with what it runs on",
        labels=["dp_rank", "peer", "path", "lanes", "library"],
    )
    for rank, link in _up(links):
        info.add_metric([str(rank), _name(link), link.path, link.lanes, link.library], 1)
    yield info
    yield _link_gauge("up", "Whether a link may be used", links, lambda link: link.state == LINK_STATE_UP)
    measured = [item for item in _up(links) if item[1].bytes_per_s]
    yield _link_gauge("gbps", "GB/s when the link was tested", measured, lambda link: link.bytes_per_s / 1e9)
    yield _link_gauge("rtt_seconds", "Round trip of a small note", _up(links), lambda link: link.rtt_s)
    yield _link_gauge("in_flight_bytes", "Posted, not complete", _up(links), lambda link: link.in_flight_bytes)
    yield _link_gauge("queued_bytes", "Not posted yet", _up(links), lambda link: link.queued_bytes)


def _link_gauge(
    name: str, words: str, links: Iterable[tuple[int, LinkStatus]], value: Callable[[LinkStatus], float]
) -> Metric:
    family = GaugeMetricFamily(f"diptych_kv_link_{name}", words, labels=["dp_rank", "peer"])
    for rank, link in links:
        family.add_metric([str(rank), _name(link)], value(link))
    return family


def _up(links: Iterable[tuple[int, LinkStatus]]) -> list[tuple[int, LinkStatus]]:
    return [(rank, link) for rank, link in links if link.state == LINK_STATE_UP]


def _name(link: LinkStatus) -> str:
    return f"{link.peer_instance_id:016x}"


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


def metrics_app(metrics: WorkerMetrics, groups: Callable[[], Iterable[WorkerGroup]]) -> Starlette:
    """Return the application. `groups` are asked how they are at each scrape."""

    async def scrape(request: Request) -> Response:
        asked = list(groups())
        answers = await asyncio.gather(*map(_status, asked))
        statuses = {group.dp_rank: answer for group, answer in zip(asked, answers, strict=True)}
        return Response(metrics.exposition(statuses), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Starlette(routes=[Route("/metrics", scrape)])


async def _status(group: WorkerGroup) -> WorkerStatus | None:
    """Return None for a scheduler that is loading, busy, stopped or dead."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await group.status()
    except (TimeoutError, SchedulerDied):
        return None
