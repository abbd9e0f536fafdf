"""The router's metrics, in a registry of their own. Durations in seconds.

`KeyUsage` tells what the holders of API keys use. Its labels are the names of configured keys, hence bounded.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.common.build_info import register_version
from diptych.common.members.roles import WORKER_ROLES, LegKind, Role
from diptych.common.refusals import Refusals
from diptych.generation.output import FailureCode
from diptych.grammars.checks import GrammarChecks
from diptych.router.admission.admission import Admission
from diptych.router.admission.queue import Reason
from diptych.router.admission.session_desk import Desk
from diptych.router.keys.caller import Callers, KeyHolder
from diptych.router.pool_metrics import PoolMember, PoolMetrics
from diptych.router.size_metrics import SizeMetrics
from diptych.router.tracing.record import FAILURES
from diptych.router.values.served import ITL_BOUNDS, TTFT_BOUNDS, Served
from diptych.router.values.slo_tiers import NO_TIERS, Tier, Tiers
from diptych.tokens.segment_cache import SegmentCache
from diptych.v1.worker_pb2 import LegStats

ANSWER_BUCKETS: Final = (*TTFT_BOUNDS, 1200.0, 1800.0, 3600.0)  # of whole answers
RATIO_BUCKETS: Final = (0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
STAGE_BUCKETS: Final = (
    0.0001,
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
    60.0,
    300.0,
    600.0,
    3600.0,
)
LEG_STAGES: Final[Mapping[LegKind, tuple[str, Sequence[str]]]] = {  # as `LegStats` names them
    LegKind.PREFILL: ("prefill", ("queue", "compute", "transfer")),
    LegKind.DECODE: ("decode", ("queue", "transfer", "join")),
    LegKind.LOCAL: ("prefill", ("queue", "compute")),
    LegKind.POOL: ("prefill", ("queue", "compute")),
    LegKind.ENCODE: ("encode", ("queue", "compute")),
}
APIS: Final = ("chat", "completions", "responses", "messages", "generate", "tokens", "vectors", "batch", "grpc")
KEY_PREFIX: Final = "diptych_router_key"


class FleetCounts(Protocol):
    """What is counted of the workers."""

    def num_open_legs(self, role: Role) -> int: ...

    def num_cached_pages(self, role: Role) -> int: ...

    def num_in_sync(self, role: Role) -> int: ...

    @property
    def prefix_index_bytes(self) -> int: ...

    def pool_members(self) -> Iterable[PoolMember]: ...


class TierCounts(NamedTuple):
    """The counters of a tier."""

    offered: Counter
    within: Counter
    shed: Counter


class OwnedValue:
    """A number that the event loop changes, and other threads only read: it takes no lock."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def get(self) -> float:
        return self.value

    def get_exemplar(self) -> None:
        """There is never one."""


class QuickCounter(Counter):
    """A counter of the event loop's."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._value = OwnedValue()

    def labels(self, *labelvalues: object, **labelkwargs: object) -> Self:
        """Return the counter of these values; one that has counted is found at once, if all are text."""
        found = cast("dict[tuple[object, ...], Self]", self._metrics).get(labelvalues)
        return found or super().labels(*labelvalues, **labelkwargs)

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        assert exemplar is None, "nobody gives any"
        self._value.value += amount


class QuickHistogram(Histogram):
    """A histogram of the event loop's, which finds the bucket by bisection: a request is observed fifteen times."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._sum = OwnedValue()
        self._buckets = [OwnedValue() for _ in self._upper_bounds]

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        assert exemplar is None, "nobody gives any"
        self._sum.value += amount
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].value += 1


class RouterMetrics:
    """What the router counts and measures."""

    def __init__(self, tiers: Tiers = NO_TIERS) -> None:
        self.registry = CollectorRegistry()
        self.refusals = Refusals()  # of what only operators may do
        self.registry.register(self.refusals)
        register_version(self.registry)
        self._add_counters()
        self._sizes = SizeMetrics()
        self.registry.register(self._sizes)
        self._tiers = {name: self._tier_counts(name) for name in tiers.slos}
        self._show_objectives(tiers)
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
        self.cold = gauge("requests_waiting_for_workers", "Requests that wait until workers have started")
        self._waiting = gauge("requests_waiting", "Requests in line for admission")
        self._batches = gauge("batches_running", "Batches that this process works on")
        self._lines = gauge("batch_lines_running", "Requests of batches that run")

    def _add_counters(self) -> None:
        def counter(name: str, words: str, *labels: str) -> Counter:
            return QuickCounter(f"diptych_router_{name}", words, labels, registry=self.registry)

        self.requests = counter("requests", "Requests that ended, by API and outcome", "api", "outcome")
        self.turned_away = counter("turned_away", "Requests refused for lack of room or time, by reason", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in a prefill worker's prefix cache")
        self.output_tokens = counter("output_tokens", "Output tokens of finished requests")
        self._offered = counter("offered", "Requests that came, valid and within the limits of their keys", "tier")
        self._within = counter("within_objectives", "Finished requests that kept the SLO that they had", "tier")
        self._shed = counter("shed", "Requests refused because their tier gives way to others", "tier")
        self.attempts = counter("attempts", "Attempts begun, by policy and number of workers", "policy", "workers")
        self.pool_attempts = counter("declared_pool_attempts", "Attempts begun, by declared pool", "pool")
        self.pool_failures = counter("declared_pool_failures", "Attempts that failed, by declared pool", "pool")
        self.retries = counter("retries", "Attempts that failed and were tried again, by reason", "reason")
        self.handed_back = counter("handed_back", "Attempts that a leaving worker handed back, done elsewhere")
        self.kv_resyncs = counter("kv_resyncs", "Times a worker was asked for all its cached pages, after a gap")
        self.hedges = counter("hedges", "Second attempts beside one that was slow to answer")
        self.replays = counter("replays", "Retries that continued after tokens had been sent")
        self._batch_lines = counter("batch_lines", "Requests of batches that were run, by outcome", "outcome")
        self.images_encoded = counter("images_encoded", "Images that encode workers encoded for prompts")
        self.images_late = counter("images_not_encoded", "Images left to who computes the prompt: too late, or refused")
        self.moves_begun = counter("moves_begun", "Running requests that were asked to go on at another worker")
        self.moves = counter("moves", "Running requests that went on at another worker, with their KV")
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Have what alerts look at on the page before the first time: its rate would not count that one."""
        for api, outcome in itertools.product(APIS, (*sorted(FAILURES), "overloaded")):
            self.requests.labels(api, outcome)
        for reason in Reason:
            self.turned_away.labels(reason.value)

    def _add_histograms(self) -> None:
        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return QuickHistogram(
                f"diptych_router_{name}_seconds", words, labels, buckets=buckets, registry=self.registry
            )

        self.ttft = histogram("ttft", "Arrival to the first output token", TTFT_BOUNDS)
        self.itl = histogram("itl", "Gap between two arrivals of output tokens of a request", ITL_BOUNDS)
        self.e2e = histogram("e2e", "Arrival to the end of a finished request", ANSWER_BUCKETS)
        self.ttft_ratio = QuickHistogram(
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
        self._leg_stages = {
            kind: {f"{stage}_us": stages.labels(f"{role}_{stage}") for stage in names}
            for kind, (role, names) in LEG_STAGES.items()
        }

    def _show_objectives(self, tiers: Tiers) -> None:
        words = "Objectives of a tier: time to the first token, and for each other one; 0: none"
        objectives = Gauge("diptych_router_objective_seconds", words, ["tier", "of"], registry=self.registry)
        for name, slo in tiers.slos.items():
            objectives.labels(name, "ttft").set(slo.ttft_s)
            objectives.labels(name, "tpot").set(slo.tpot_s)

    def watch(self, fleet: FleetCounts, admission: Admission) -> None:
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

    def watch_batches(self, num_batches: Callable[[], int], num_lines: Callable[[], int]) -> None:
        """Likewise how many batches and lines of them run."""
        self._batches.set_function(num_batches)
        self._lines.set_function(num_lines)

    def batch_line(self, outcome: str) -> None:
        """A line of a batch was run."""
        self._batch_lines.labels(outcome).inc()

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
        for duration, stage in self._leg_stages[leg].items():
            stage.observe(getattr(stats, duration) / 1e6)

    def _tier_counts(self, name: str) -> TierCounts:
        return TierCounts(self._offered.labels(name), self._within.labels(name), self._shed.labels(name))

    def offered(self, tier: Tier, num_requests: int) -> None:
        """A call has come, of so many requests."""
        self._tiers[tier.name].offered.inc(num_requests)

    def shed(self, tier: Tier, num_requests: int) -> None:
        """And is refused, as its tier gives way."""
        self._tiers[tier.name].shed.inc(num_requests)

    def finished(self, tier: Tier, ttft_s: float, tpot_s: float, e2e_s: float) -> None:
        """A request has all of its output: the first token after `ttft_s`, each other one after `tpot_s`."""
        self.e2e.observe(e2e_s)
        if tier.slo.are_kept(ttft_s, tpot_s):
            self._tiers[tier.name].within.inc()

    def used(self, prompt_len: int, cached_tokens: int, output_tokens: int) -> None:
        """A request that has finished took so many tokens."""
        self.prompt_tokens.inc(prompt_len)
        self.cached_tokens.inc(cached_tokens)
        self.output_tokens.inc(output_tokens)
        self._sizes.add(prompt_len, cached_tokens, output_tokens)

    def served(self) -> Served:
        """Return counts, in microseconds: `collect` would make an object of each sample."""
        ended: dict[str, float] = collections.defaultdict(float)
        for (_, outcome), requests in list(cast("dict[tuple[str, str], Counter]", self.requests._metrics).items()):
            ended[outcome] += requests._value.get()
        ttft, itl, e2e = (tuple(each.get() for each in of._buckets) for of in (self.ttft, self.itl, self.e2e))
        return Served(
            requests=sum(ended.values()),
            errors=sum(ended[outcome] for outcome in FAILURES),
            refused=ended["overloaded"],
            finished=sum(e2e),
            good=sum(each.within._value.get() for each in self._tiers.values()),
            prompt_tokens=self.prompt_tokens._value.get(),
            cached_tokens=self.cached_tokens._value.get(),
            output_tokens=self.output_tokens._value.get(),
            ttft=ttft,
            itl=itl,
        )

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class KeyUsage(Collector):
    """Reads the counts of callers."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def collect(self) -> Iterator[Metric]:
        yield self._counter("calls", "Calls of the API within the limits of the key", lambda holder: holder.num_calls)
        yield self._counter("prompt_tokens", "Prompt tokens", lambda holder: holder.prompt_tokens)
        yield self._counter("output_tokens", "Output tokens, of requests that have ended", lambda h: h.output_tokens)
        running = GaugeMetricFamily(f"{KEY_PREFIX}_requests_running", "Requests that have not ended", labels=["key"])
        limited = CounterMetricFamily(f"{KEY_PREFIX}_limited", "Calls refused for a limit", labels=["key", "limit"])
        for name, holder in self._callers.holders.items():
            running.add_metric([name], holder.num_running)
            for limit, count in sorted(holder.refusals.items()):
                limited.add_metric([name, limit], count)
        refused = CounterMetricFamily(
            f"{KEY_PREFIX}_refusals", "Calls refused for their key or its lack", labels=["reason"]
        )
        for reason, count in sorted(self._callers.refusals.items()):
            refused.add_metric([reason], count)
        yield from (running, limited, refused)

    def _counter(self, name: str, words: str, value: Callable[[KeyHolder], float]) -> Metric:
        family = CounterMetricFamily(f"{KEY_PREFIX}_{name}", f"{words}, by the name of the key", labels=["key"])
        for key, holder in self._callers.holders.items():
            family.add_metric([key], value(holder))
        return family


class GrammarUsage(Collector):
    """Tells what became of the schemas, patterns and grammars of clients."""

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


class SessionLineUsage(Collector):
    """Tells of the line in which clients wait for room for their sessions."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        usage, name = self._desk.usage(), "diptych_router_session_line"
        if usage is None:
            return
        yield GaugeMetricFamily(f"{name}_waiting", "Sessions that wait for room in the KV pools", usage.num_waiting)
        yield GaugeMetricFamily(f"{name}_in", "Sessions that were let in and have not ended", usage.num_in)
        yield GaugeMetricFamily(f"{name}_tokens", "Context that these count with", usage.num_tokens)
        words = "Context that they may have together, of this router"
        yield GaugeMetricFamily(f"{name}_capacity_tokens", words, usage.capacity_tokens)
        yield CounterMetricFamily(f"{name}_admitted", "Sessions that were let in", usage.num_admitted)
        yield CounterMetricFamily(f"{name}_given_up", "Calls that were told to come back", usage.num_given_up)
        words = "Sessions and places in line that nobody used for too long"
        yield CounterMetricFamily(f"{name}_expired", words, usage.num_expired)
        yield CounterMetricFamily(f"{name}_wait_seconds", "What calls have waited, together", usage.waited_s)


class TokenizerUsage(Collector):
    """Tells how much of the prompts was known to caches of tokens."""

    def __init__(self, caches: Sequence[SegmentCache]) -> None:
        """`caches`: one a model."""
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        words = "Characters of prompts, by whether their tokens were remembered"
        chars = CounterMetricFamily("diptych_router_prompt_chars", words, labels=["known"])
        chars.add_metric(["true"], sum(cache.known_chars for cache in self._caches))
        chars.add_metric(["false"], sum(cache.new_chars for cache in self._caches))
        yield chars
        name, words = "diptych_router_tokenizer_cache_bytes", "Memory that remembered tokens take"
        yield GaugeMetricFamily(name, words, sum(cache.num_bytes for cache in self._caches))
