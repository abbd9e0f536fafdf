"""Watches a platform and says what a planner would do with it: `diptych planner`, in shadow. It changes nothing.

Level-triggered: every round asks bootstrap who is there and routers what they counted. A plan that differs from the
one before is logged with its reasons; all plans are at `--metrics-port`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.requests.asking import ask_all, members
from diptych.cli.simulate import H200, SimulateConfig, worker_of
from diptych.common import event_loop
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogConfig, setup
from diptych.common.members.instances import computable_tokens
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, WorkerRole
from diptych.engine.values.step_model import StepModel
from diptych.planner.counters import Counts, Sample, offered_by
from diptych.planner.planner import EVERY_S, Planner
from diptych.planner.values import (
    PLANNED_ROLES,
    Capacity,
    Goal,
    Limits,
    Memory,
    Observed,
    Occupancy,
    Plan,
    Sizes,
    Worker,
    WorkerState,
)
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance

logger = logging.getLogger(__name__)

WINDOWS_S: Final = (60.0, 300.0)
ANSWER_S: Final = 5.0  # that a router's page may take
OUTPUT_LEN: Final = 100.0  # of a request, until one has finished
REFUSED: Final = frozenset({"forbidden", "invalid", "not_found", "rate_limited", "unauthenticated"})  # by nature
_PREFIX: Final = "diptych_router_"
_STATES: Final = {
    State.STARTING: WorkerState.STARTING,
    State.READY: WorkerState.READY,
    State.DRAINING: WorkerState.DRAINING,
}
_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)  # no slots, as its base
class PlannerConfig(LogConfig, MembersConfig):
    """Say how many workers of which role a running platform needs within its SLO, and why; change nothing.

    It reads bootstrap and the metrics of routers, and needs no other rights.
    """

    interval_s: float = option(EVERY_S, help="how often to plan, in seconds")
    ttft_slo_ms: float = option(1000.0, help="time to the first token; 0: any", group="slo")
    tpot_slo_ms: float = option(50.0, help="time for each token after it, in a request's mean; 0: any", group="slo")
    share: float = option(0.9, help="of the requests that are offered, that are to keep both", group="slo")
    gpus: int = option(
        0, help="GPUs that there are for workers; 0: not known, and no more is planned", group="platform"
    )
    tp: int = option(1, help="GPUs of a worker", group="platform")
    least: tuple[str, ...] = option((), help="workers that stay in any case: prefill=1,decode=1", group="platform")
    start_s: float = option(60.0, help="that a worker takes to start", group="platform")
    step_model: str = option(H200, help=f"file of `diptych fit`, or {H200}: Llama-3-8B on an H200", group="platform")
    page_size: int = option(16, help="tokens a KV page, as workers have it", group="platform")
    metrics_port: int = option(0, help="port that serves what is planned, as metrics; 0: none")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if min(self.interval_s, self.start_s) <= 0 or min(self.tp, self.page_size) < 1:
            raise ConfigError("--interval-s, --start-s, --tp and --page-size must be positive")
        if not self.interval_s <= WINDOWS_S[0] / 2:
            raise ConfigError(
                f"--interval-s must be {WINDOWS_S[0] / 2:g} at most: loads are means of {WINDOWS_S[0]:g} s"
            )
        if self.gpus < 0 or not min(self.ttft_slo_ms, self.tpot_slo_ms) >= 0:
            raise ConfigError("--gpus, --ttft-slo-ms and --tpot-slo-ms must not be negative")
        if not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"--metrics-port must be a port, not {self.metrics_port}")
        if not 0 < self.share < 1:
            raise ConfigError(f"--share must be above 0 and below 1, not {self.share:g}")
        sizes_of(self.least)

    @property
    def limits(self) -> Limits:
        return Limits(sizes_of(self.least), budget_gpus=self.gpus or None)


def sizes_of(texts: Iterable[str]) -> Sizes:
    """Return the workers of `prefill=1`, `decode=2`, `unified=3`. Raises `ConfigError`."""
    found = dict.fromkeys(get_args(WorkerRole), 0)
    for text in texts:
        role, _, number = text.partition("=")
        if role not in found or not number.isdecimal():
            raise ConfigError(f"--least: {text!r} is none of prefill=N, decode=N, unified=N")
        found[role] = int(number)
    return Sizes(*(found[each.value] for each in PLANNED_ROLES))


class PlanMetrics:
    """The last plan, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        wanted = Gauge("diptych_planner_workers", "Workers that are wanted", ["role"], registry=self.registry)
        self._wanted = {each: wanted.labels(each.value) for each in PLANNED_ROLES}
        self._admitted = Gauge(
            "diptych_planner_admitted_requests_per_s", "Requests to let in; infinite: all", registry=self.registry
        )
        self._reasons = Counter("diptych_planner_reasons", "Rounds by reason", ["why"], registry=self.registry)

    def show(self, plan: Plan) -> None:
        for role in PLANNED_ROLES:
            self._wanted[role].set(plan.sizes.of(role))
        self._admitted.set(plan.admission.requests_per_s)
        for why in plan.why:
            self._reasons.labels(why.value).inc()


def _unheard(memory: Memory, before: Memory) -> Memory:
    """Return what a planner remembers whose plans nobody carries out: what it saw, not what it asked for."""
    return replace(memory, asked=None, shrunk_s=before.shrunk_s, flipped_s=before.flipped_s)


@dataclass(slots=True)
class Watcher:
    """What is kept of a platform from one round to the next, beside the planner's own memory."""

    config: PlannerConfig
    step_model: StepModel
    planner: Planner = field(default_factory=Planner)
    samples: list[Sample] = field(default_factory=list)
    since_s: dict[tuple[int, WorkerState, int], float] = field(default_factory=dict)
    last: Plan | None = None

    def round(self, now_s: float, listed: Iterable[Instance], routers: Mapping[str, Counts | None]) -> Plan:
        """Return what is planned for what there is now; log it where it is something new."""
        kept = [each for each in self.samples if each.at_s >= now_s - WINDOWS_S[-1] - self.config.interval_s]
        self.samples = [*kept, Sample(now_s, routers)]
        before = self.planner.memory
        made = self.planner(self._observed(now_s, list(listed)))
        self.planner.memory = _unheard(self.planner.memory, before)
        if self.last is None or (made.sizes, made.roles, made.why) != (self.last.sizes, self.last.roles, self.last.why):
            logger.info("%s: %s", made.sizes, "; ".join(f"[{each.why.value}] {each.words}" for each in made.reasons))
        self.last = made
        return made

    def _observed(self, now_s: float, listed: list[Instance]) -> Observed:
        there = [each for each in listed if each.role in WORKER_ROLES and State(each.state) in _STATES]
        pages = max((each.load.total_pages for each in there), default=0)
        offered = offered_by(self.samples, WINDOWS_S)
        output_len = self._output_len()
        marks = {self._mark(each): self.since_s.get(self._mark(each), now_s) for each in there}
        self.since_s = marks
        return Observed(
            now_s,
            tuple(self._worker(each, marks[self._mark(each)], output_len) for each in there),
            offered,
            Goal(self.config.ttft_slo_ms / 1000, self.config.tpot_slo_ms / 1000, self.config.share),
            Capacity(self.step_model, pages * self.config.page_size or 1, num_gpus=self.config.tp),
            self.config.limits,
            start_s=self.config.start_s,
        )

    def _output_len(self) -> float:
        counts = [each for each in self.samples[-1].routers.values() if each is not None]
        finished = sum(each.finished for each in counts)
        return sum(each.output_tokens for each in counts) / finished if finished else OUTPUT_LEN

    def _mark(self, member: Instance) -> tuple[int, WorkerState, int]:
        return member.instance_id, _STATES[State(member.state)], member.role

    def _worker(self, member: Instance, since_s: float, output_len: float) -> Worker:
        load = member.load
        tokens = (load.total_pages - load.free_pages) * self.config.page_size
        left = load.num_running * output_len / 2 + load.num_waiting * output_len
        held = Occupancy(load.num_running, load.num_waiting, computable_tokens(load), tokens, left)
        state, role = _STATES[State(member.state)], WORKER_ROLES[member.role]
        return Worker(member.instance_id, role, state, since_s, held if member.HasField("load") else None)


def main(config: PlannerConfig) -> int:
    """Run until SIGTERM; return the exit code."""
    config = located(config)
    setup("planner", config.log_format, config.log_level)
    trust, metrics = config.trust(), PlanMetrics()
    watcher = Watcher(config, worker_of(SimulateConfig(step_model=config.step_model)).step_model)
    if config.metrics_port:
        start_http_server(config.metrics_port, registry=metrics.registry)
    logger.info("planning every %g s, in shadow: nothing is changed", config.interval_s)

    def look() -> None:
        listed = members(config.bootstrap, trust)
        pages = {each.metrics_address: each for each in listed if each.role == ROLE_ROUTER and each.metrics_address}
        counts = ask_all(pages.values(), lambda router: _counted(router.metrics_address))
        metrics.show(watcher.round(time.monotonic(), listed, dict(zip(pages, counts, strict=True))))

    asyncio.run(event_loop.run_until_signal(lambda stop: event_loop.repeat(look, config.interval_s, stop)))
    return 0


def _counted(address: str) -> Counts | None:
    """Return what a router has counted, None if it does not say."""
    try:
        with _DIRECTLY.open(f"http://{address}/metrics", timeout=ANSWER_S) as answer:
            return counts_of(answer.read().decode())
    except (OSError, ValueError) as error:
        logger.warning("a router's metrics at %s can't be read: %s", address, error)
        return None


def counts_of(page: str) -> Counts:
    """Return what a router's metrics say. Raises `ValueError` for what are no metrics of a router."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            is_load = sample.labels.get("api") != "tokens" and sample.labels.get("outcome") not in REFUSED
            if sample.name.startswith(_PREFIX) and is_load:
                name = sample.name.removeprefix(_PREFIX)
                sums[name] = sums.get(name, 0.0) + sample.value
    if "requests_running" not in sums:
        raise ValueError("it has no diptych_router_requests_running")
    prompt, cached, output = (sums.get(f"{each}_tokens_total", 0.0) for each in ("prompt", "cached", "output"))
    in_flight = sums["requests_running"] + sums.get("requests_waiting", 0.0)
    ended, finished = sums.get("requests_total", 0.0), sums.get("e2e_seconds_count", 0.0)
    counts = Counts(ended, finished, prompt, cached, output, in_flight)
    if not all(map(math.isfinite, counts)):
        raise ValueError("it counts what is no number")
    return counts
