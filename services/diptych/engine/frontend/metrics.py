"""Tells Prometheus of a worker's KV transfers, and of its load, by which its pool is scaled. Durations in seconds.

What schedulers count is asked of them when somebody scrapes; what happens once a request is taken from its last output.
Nothing is done for a step or a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.common.build_info import register_certificate_expiry, register_version
from diptych.common.members.instances import computable_tokens, kv_demand, kv_occupancy, prompt_budget, role_of
from diptych.common.members.record import State
from diptych.common.refusals import Refusals
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.health import SchedulerSilent
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.engine.frontend.service import name_of
from diptych.kvtransfer.layout import layout_from_wire
from diptych.v1.worker_pb2 import LINK_STATE_UP, Drain, FileTierStatus, LegStats, LinkStatus, WorkerStatus

if TYPE_CHECKING:
    from diptych.common.trust.tls import Tls

TRANSFER_BUCKETS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    120.0,
)

Statuses = Mapping[int, WorkerStatus | None]  # by data-parallel rank; None: its scheduler does not answer
Answered = Mapping[int, WorkerStatus]
Silences = Mapping[int, int]  # seconds since each scheduler was heard, by rank; 0: no longer than a step may take
Value = Callable[[WorkerStatus], float | None]  # None: not known
Kind = type[GaugeMetricFamily | CounterMetricFamily]
Row = tuple[str, str, Callable[[WorkerStatus], float]]

COUNTERS: Final[Sequence[Row]] = (  # what a scheduler counts since its start
    ("integrity_failures", "Hand-offs and pulls whose bytes were wrong; must be 0", lambda s: s.integrity_failures),
    ("link_failures", "Links to peers that broke or failed their test", lambda s: s.link_failures),
    ("unauthenticated_messages", "Transfer messages without our link key", lambda s: s.unauthenticated_messages),
    ("refused_page_writes", "Transfer messages for pages not granted", lambda s: s.refused_page_writes),
    ("retractions", "Requests that had to give up their pages for a while", lambda s: s.retractions),
    ("pages_pulled", "Pages of prefixes that another worker had, verified", lambda s: s.pages_pulled),
    ("pages_lent", "Pages of prefixes that other workers pulled from here", lambda s: s.pages_lent),
    ("pulls_refused", "Pulls for which the other worker had nothing, or no time", lambda s: s.pulls_refused),
    ("pulls_missed", "Pulls that came too late, or were lost with their link", lambda s: s.pulls_missed),
    ("pulls_wrong", "Pulls that were not what was sent; must be 0", lambda s: s.pulls_wrong),
    ("pages_given", "Cached pages that others took when they were offered", lambda s: s.pages_given),
    ("pages_taken", "Of the pages that were pulled, those that were offered", lambda s: s.pages_taken),
    ("offers_declined", "Cached texts that nobody had room for as this worker left", lambda s: s.offers_declined),
)
GAUGES: Final[Sequence[Row]] = (  # how a scheduler is now
    ("kv_leaks_found", "Contradictions in the books of KV pages; must be 0", lambda s: s.leaks_found),
    ("kv_quarantine_oldest_seconds", "Age of the oldest page in quarantine", lambda s: s.quarantine_oldest_s),
    (
        "kv_listener_guarded",
        "1 where strangers get no connection of the transfer library",
        lambda s: not s.kv_port_open,
    ),
    (
        "prompt_budget_tokens",
        "Prompt tokens that a step may have beside its outputs",
        lambda s: prompt_budget(s.instance.load),
    ),
    ("kv_pull_saved_seconds", "Computing that pulls saved since start, less what they took", lambda s: s.pull_saved_s),
    ("adapters_waited_for", "Requests whose adapter has no slot", lambda s: s.waiting_for_adapter),
    ("gpu_graphs", "Sizes of steps that are captured", lambda s: s.graphs),
    ("gpu_graph_bytes", "GPU memory that these took", lambda s: s.graph_bytes),
)
CACHE_GAUGES: Final[Sequence[Row]] = (
    ("cache_pins", "Texts that are kept for sessions that have called a tool", lambda s: s.cache.pins),
    ("cache_pinned_pages", "Pages that these take", lambda s: s.cache.pinned_pages),
)
CACHE_COUNTERS: Final[Sequence[Row]] = (
    ("prompt_tokens", "Tokens of prompts that were computed here", lambda s: s.cache.prompt_tokens),
    ("evicted_pages", "Pages that left the KV pool", lambda s: s.cache.evicted_pages),
    ("pins_given_up", "Kept texts that were given up for lack of memory", lambda s: s.cache.pins_given_up),
    ("tool_calls", "Tool calls that routers told of", lambda s: s.cache.tool_calls),
    ("tool_returns", "Sessions that came back from one", lambda s: s.cache.tool_returns),
    ("kept_returns", "Of these, sessions whose text was kept", lambda s: s.cache.kept_returns),
)
WEIGHTS: Final[Sequence[Row]] = (  # between workers, since start
    ("weights_taken_bytes", "Bytes of weights that came from another worker at start", lambda s: s.weights_taken_bytes),
    ("weights_givers_failed", "Workers asked for weights in vain at start", lambda s: s.weights_givers_failed),
    ("weights_given", "Streams of weights that starting workers took from here", lambda s: s.weights_given),
)
IMAGES: Final[Sequence[Row]] = (  # since the model was loaded
    ("images_encoded", "Images that the model's tower computed", lambda s: s.images_encoded),
    ("image_places_encoded", "Places of prompts that these take", lambda s: s.image_places_encoded),
    ("images_reused", "Images of prompts that were computed already", lambda s: s.images_reused),
    ("images_pulled", "Images of prompts whose rows an encode worker had made", lambda s: s.images_pulled),
)
PLACED: Final[Row] = ("adapters_placed", "Adapters that were brought into a slot", lambda s: s.adapters_placed)
SPECULATION: Final[Sequence[tuple[Kind, Row]]] = (  # where somebody guesses
    (CounterMetricFamily, ("speculation_asked", "Times a request was asked about", lambda s: s.drafting.asked)),
    (CounterMetricFamily, ("speculation_asking_seconds", "Time that took", lambda s: s.drafting.asking_s)),
    (
        GaugeMetricFamily,
        ("speculation_saved_seconds", "Time of steps that guesses saved, since start", lambda s: s.drafting.saved_s),
    ),
    (GaugeMetricFamily, ("speculation_held_bytes", "Memory of what sources know", lambda s: s.drafting.held_bytes)),
)
LASTING: Final[Sequence[tuple[Kind, str, str, str]]] = (  # of files or a store: name, words, field of its status
    (GaugeMetricFamily, "pages", "KV pages there, as far as is known", "pages"),
    (GaugeMetricFamily, "bytes", "Size of these", "bytes"),
    (CounterMetricFamily, "pages_written", "KV pages written", "pages_written"),
    (CounterMetricFamily, "written_bytes", "What was written", "bytes_written"),
    (CounterMetricFamily, "pages_dropped", "KV pages that would have waited too long to be written", "pages_dropped"),
    (CounterMetricFamily, "pages_failed", "KV pages of writes that failed", "pages_failed"),
    (CounterMetricFamily, "pages_read", "KV pages brought back", "pages_read"),
    (CounterMetricFamily, "read_bytes", "What was read", "bytes_read"),
    (CounterMetricFamily, "pages_corrupt", "KV pages that were not as written; must be 0", "pages_corrupt"),
    (CounterMetricFamily, "loads_failed", "Loads that failed, hung or came late", "loads_failed"),
    (CounterMetricFamily, "pauses", "Times that it was not asked for a while", "pauses"),
    (CounterMetricFamily, "pages_not_loaded", "KV pages that were found, and sooner computed", "pages_not_loaded"),
    (CounterMetricFamily, "saved_seconds", "Computing that loads saved, as predicted", "saved_s"),
)
LOOKUPS: Final[Sequence[tuple[Kind, str, str, str]]] = (  # of a store alone
    (CounterMetricFamily, "lookups", "Texts that a store was asked for", "lookups"),
    (CounterMetricFamily, "lookups_failed", "Texts of which it did not answer", "lookups_failed"),
    (CounterMetricFamily, "runs_found", "Objects that it had of them", "runs_found"),
)
LABELS: Final = ("dp_rank", "role", "pool")
ANSWER_S: Final = 2.0  # that a scheduler gets; it answers between two steps


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._registry = CollectorRegistry()
        self.refusals = Refusals()  # of the gRPC server
        self._registry.register(self.refusals)
        register_version(self._registry)
        register_certificate_expiry(self._registry, tls)
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

    def exposition(self, statuses: Statuses, silent_s: Silences) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(_Families(statuses, silent_s))


class _Families(Collector):
    """The families of one scrape, in place of a registry of lasting ones."""

    def __init__(self, statuses: Statuses, silent_s: Silences) -> None:
        self._statuses = statuses
        self._silent_s = silent_s

    def collect(self) -> Iterator[Metric]:
        return families(self._statuses, self._silent_s)


def families(statuses: Statuses, silent_s: Silences) -> Iterator[Metric]:
    """Yield what schedulers said of themselves, one sample a scheduler or link, and for how long they say nothing."""
    ups = [([str(rank)], status is not None) for rank, status in statuses.items()]
    yield _family(GaugeMetricFamily, "worker_up", "Whether a scheduler answers", ["dp_rank"], ups)
    words = "Time that a scheduler has been silent; 0: no longer than a step may take"
    silences = [([str(rank)], each) for rank, each in silent_s.items()]
    yield _family(GaugeMetricFamily, "worker_silent_seconds", words, ["dp_rank"], silences)
    answered = {rank: status for rank, status in statuses.items() if status is not None}
    yield from _drain_families(answered)
    yield from load_families(answered)
    yield from _scheduler_families(answered)
    yield from _cache_families({rank: each for rank, each in answered.items() if each.HasField("cache")})
    yield from _lasting_families(
        "file", {rank: each.files for rank, each in answered.items() if each.HasField("files")}
    )
    shared = {rank: each.shared for rank, each in answered.items() if each.HasField("shared")}
    yield from _lasting_families("shared", shared, (*LASTING, *LOOKUPS))
    yield from _drafting_families({rank: each for rank, each in answered.items() if each.HasField("drafting")})
    yield from _link_families([(rank, link) for rank, status in answered.items() for link in status.links])


def _family(
    kind: Kind, name: str, words: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a family of samples, each with the values of its labels."""
    family = kind(f"diptych_{name}", words, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _by_rank(kind: Kind, row: Row, statuses: Answered) -> Metric:
    name, words, value = row
    return _family(kind, name, words, ["dp_rank"], (([str(rank)], value(each)) for rank, each in statuses.items()))


def _drain_families(statuses: Answered) -> Iterator[Metric]:
    states = [([str(rank), state_of(status)], 1) for rank, status in statuses.items()]
    yield _family(GaugeMetricFamily, "worker_state", "1 for the state of an instance", ["dp_rank", "state"], states)
    draining = {rank: status for rank, status in statuses.items() if status.HasField("drain")}
    left: Row = ("worker_drain_requests_left", "Open requests of a drain", lambda s: s.drain.requests_left)
    oldest: Row = ("worker_drain_oldest_seconds", "Age of the oldest of them", lambda s: s.drain.oldest_s)
    yield from (_by_rank(GaugeMetricFamily, row, draining) for row in (left, oldest))


def state_of(status: WorkerStatus) -> str:
    """Return "starting", "ready", "paused", "draining" or "empty"."""
    if status.drain.phase == Drain.PHASE_EMPTY:
        return "empty"
    return "paused" if status.instance.paused else State(status.instance.state).name.lower()


def _scheduler_families(statuses: Answered) -> Iterator[Metric]:
    for name, words, value in COUNTERS:
        yield _by_rank(CounterMetricFamily, (f"kv_{name}", words, value), statuses)
    yield from (_by_rank(CounterMetricFamily, row, statuses) for row in (PLACED, *WEIGHTS, *IMAGES))
    yield from (_by_rank(GaugeMetricFamily, row, statuses) for row in GAUGES)
    pages = [
        ([str(rank), state], count)
        for rank, status in statuses.items()
        for state, count in sorted(status.pages_by_state.items())
    ]
    yield _family(GaugeMetricFamily, "kv_pages", "KV pages by state", ["dp_rank", "state"], pages)
    sent: list[tuple[Sequence[str], float]] = []
    for rank, status in statuses.items():
        page_nbytes = layout_from_wire(status.instance.transfer.layout).page_nbytes
        sent.append(([str(rank), "sent"], status.pages_sent * page_nbytes))
        sent.append(([str(rank), "received"], status.pages_received * page_nbytes))
    words = "KV that was sent to or received from peers"
    yield _family(CounterMetricFamily, "kv_transfer_bytes", words, ["dp_rank", "direction"], sent)


def _cache_families(statuses: Answered) -> Iterator[Metric]:
    if not statuses:
        return
    for name, words, value in CACHE_COUNTERS:
        yield _by_rank(CounterMetricFamily, (f"cache_{name}", words, value), statuses)
    yield from (_by_rank(GaugeMetricFamily, row, statuses) for row in CACHE_GAUGES)
    tiers = [(str(rank), tier) for rank, status in statuses.items() for tier in status.cache.tiers]
    found = [([rank, tier.name], tier.found_tokens) for rank, tier in tiers]
    words = "Tokens of prompts that were found, by tier"
    yield _family(CounterMetricFamily, "cache_found_tokens", words, ["dp_rank", "tier"], found)
    pages = [([rank, tier.name], tier.pages) for rank, tier in tiers]
    yield _family(GaugeMetricFamily, "cache_pages", "Pages that are cached, by tier", ["dp_rank", "tier"], pages)
    ages = [
        ([str(rank), quantile], age_s)
        for rank, status in statuses.items()
        for quantile, age_s in (("0.5", status.cache.evicted_p50_s), ("0.9", status.cache.evicted_p90_s))
    ]
    words = "For how long pages were unused that left the KV pool of late; 0: none did"
    yield _family(GaugeMetricFamily, "cache_evicted_age_seconds", words, ["dp_rank", "quantile"], ages)


def _lasting_families(
    tier: str, statuses: Mapping[int, FileTierStatus], rows: Sequence[tuple[Kind, str, str, str]] = LASTING
) -> Iterator[Metric]:
    """Yield what files or a store hold and did; nothing where there are none."""
    for kind, name, words, field in rows if statuses else ():
        samples = [([str(rank)], getattr(status, field)) for rank, status in statuses.items()]
        yield _family(kind, f"kv_{tier}_{name}", words, ["dp_rank"], samples)


def _drafting_families(statuses: Answered) -> Iterator[Metric]:
    """Yield what came of guesses; nothing where nobody guesses."""
    if not statuses:
        return
    for name, words in (("verified", "Guesses that were verified"), ("accepted", "Guesses that came true")):
        samples = [
            ([str(rank), counts.source, str(place)], number)
            for rank, status in statuses.items()
            for counts in status.drafting.sources
            for place, number in enumerate(getattr(counts, name), 1)
            if counts.verified[place - 1]
        ]
        labels = ["dp_rank", "source", "place"]
        yield _family(CounterMetricFamily, f"speculation_{name}", words, labels, samples)
    for kind, row in SPECULATION:
        yield _by_rank(kind, row, statuses)


def _link_families(links: Sequence[tuple[int, LinkStatus]]) -> Iterator[Metric]:
    def gauge(
        name: str, words: str, links: Iterable[tuple[int, LinkStatus]], value: Callable[[LinkStatus], float]
    ) -> Metric:
        samples = [([str(rank), name_of(link.peer_instance_id)], value(link)) for rank, link in links]
        return _family(GaugeMetricFamily, f"kv_link_{name}", words, ["dp_rank", "peer"], samples)

    up = [(rank, link) for rank, link in links if link.state == LINK_STATE_UP]
    kinds = [([str(rank), name_of(link.peer_instance_id), link.path, link.lanes, link.library], 1) for rank, link in up]
    labels = ["dp_rank", "peer", "path", "lanes", "library"]
    yield _family(GaugeMetricFamily, "kv_link_info", "1 for each link that is up, with what it runs on", labels, kinds)
    yield gauge("up", "Whether a link may be used", links, lambda link: link.state == LINK_STATE_UP)
    measured = [(rank, link) for rank, link in up if link.bytes_per_s]
    yield gauge("gbps", "GB/s when the link was tested", measured, lambda link: link.bytes_per_s / 1e9)
    yield gauge("rtt_seconds", "Round trip of a small note", up, lambda link: link.rtt_s)
    yield gauge("in_flight_bytes", "Posted, not complete", up, lambda link: link.in_flight_bytes)
    yield gauge("queued_bytes", "Not posted yet", up, lambda link: link.queued_bytes)


def load_families(statuses: Answered) -> Iterator[Metric]:
    """Yield one sample a scheduler of each measure, by data-parallel rank."""

    def family(kind: Kind, name: str, words: str, value: Value) -> Metric:
        samples = [
            ([str(rank), role_of(status.instance), status.instance.pool], number)
            for rank, status in statuses.items()
            if (number := value(status)) is not None
        ]
        return _family(kind, f"worker_{name}", words, LABELS, samples)

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
        silent_s = {group.dp_rank: group.liveness.silent_s for group in asked}
        return Response(metrics.exposition(statuses, silent_s), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Starlette(routes=[Route("/metrics", scrape)])


async def _status(group: WorkerGroup) -> WorkerStatus | None:
    """Return None for a scheduler that is loading, busy, stopped or dead."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await group.status()
    except (TimeoutError, SchedulerDied, SchedulerSilent):
        return None
