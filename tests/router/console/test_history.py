from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.fits import Curve
from diptych.router.console.history import INTERVAL_S, NUM_INTERVALS, History, Tokens, charts_of, quantile
from diptych.router.console.pieces import at_once
from diptych.router.metrics import RouterMetrics
from diptych.router.pool_metrics import PoolMember
from diptych.router.values.served import ITL_BOUNDS, TTFT_BOUNDS
from diptych.router.values.slo_tiers import Tier
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    Instance,
    WorkerLoad,
)

SLO = Slo(0.2, 0.05)
BEGUN_S = 1_800_000_000.0  # a multiple of the interval


@dataclass
class Line:
    num_running: int = 0
    num_waiting: int = 0


@dataclass
class World:
    """A router's process that counts, and what is kept of it."""

    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    slo: Slo = SLO
    line: Line = field(default_factory=Line)
    members: list[PoolMember] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.metrics.served, self.line, lambda: self.members)

    def serve(self, ttft_s: float, num_tokens: int = 1, tpot_s: float = 0.01, prompt: tuple[int, int] = (0, 0)) -> None:
        self.metrics.ttft.observe(ttft_s)
        for _ in range(num_tokens - 1):
            self.metrics.itl.observe(tpot_s)
        self.metrics.finished(Tier(slo=self.slo), ttft_s, tpot_s, ttft_s + num_tokens * tpot_s)
        self.metrics.output_tokens.inc(num_tokens)
        self.metrics.prompt_tokens.inc(prompt[0])
        self.metrics.cached_tokens.inc(prompt[1])
        self.metrics.requests.labels("chat", "ok").inc()

    def fail(self, outcome: str) -> None:
        self.metrics.requests.labels("chat", outcome).inc()


def values(world: World, name: str) -> list[float | None]:
    return at_once(world.history.charts())["series"][name]["values"]


def test_an_interval_shows_what_was_served_in_it() -> None:
    world = World()
    world.serve(0.1)  # before the first sample: of no interval
    at_once(world.history.sample(BEGUN_S))
    for _ in range(10):
        world.serve(0.1, num_tokens=6, prompt=(100, 40))
    world.line.num_running, world.line.num_waiting = 7, 2
    at_once(world.history.sample(BEGUN_S + INTERVAL_S))
    at_once(world.history.sample(BEGUN_S + 2 * INTERVAL_S))
    charts = at_once(world.history.charts())
    assert (charts["begun_unix_s"], charts["interval_s"]) == (BEGUN_S, INTERVAL_S)
    assert values(world, "requests") == [2.0, 0.0]
    assert values(world, "prompt_tokens") == [200.0, 0.0]
    assert values(world, "output_tokens") == [12.0, 0.0]
    assert values(world, "running") == [7, 7]
    assert values(world, "queued") == [2, 2]
    assert values(world, "ttft_p50") == [pytest.approx(0.075), None]
    assert values(world, "itl_p50") == [pytest.approx(0.0075), None]
    assert {name: each["unit"] for name, each in charts["series"].items()} == {
        **dict.fromkeys(("requests", "errors"), "requests/s"),
        **dict.fromkeys(("prompt_tokens", "output_tokens"), "tokens/s"),
        **dict.fromkeys(("queued", "running"), "requests"),
        **dict.fromkeys(("ttft_p50", "ttft_p95", "itl_p50", "itl_p95"), "s"),
        "goodput": "share",
    }


def test_goodput_is_the_share_within_the_objectives_and_what_we_failed_or_refused_is_not() -> None:
    world = World()
    at_once(world.history.sample(BEGUN_S))
    world.serve(0.1)
    world.serve(0.3)  # its first token is late
    world.serve(0.1, 5, tpot_s=0.06)  # its others are
    for outcome in ("error", "unavailable", "deadline", "overloaded"):
        world.fail(outcome)
    for outcome in ("invalid", "disconnected", "rate_limited"):  # the client's doing
        world.fail(outcome)
    at_once(world.history.sample(BEGUN_S + INTERVAL_S))
    assert values(world, "goodput") == [pytest.approx(1 / 7, abs=1e-6)]
    assert values(world, "errors") == [0.6]
    assert values(world, "requests") == [2.0]


def test_without_objectives_all_that_is_finished_is_good() -> None:
    world = World(slo=NO_SLO)
    at_once(world.history.sample(BEGUN_S))
    world.serve(50.0)
    at_once(world.history.sample(BEGUN_S + INTERVAL_S))
    assert values(world, "goodput") == [1.0]


def test_pools_show_the_share_of_their_pages_and_the_mean_queue() -> None:
    def member(role: int, load: WorkerLoad, state: int = INSTANCE_STATE_READY) -> PoolMember:
        return PoolMember(Instance(role=role, state=state), load, Curve(0.0, 0.001))  # type: ignore[arg-type]

    world = World()
    world.members = [
        member(ROLE_PREFILL, WorkerLoad(total_pages=100, free_pages=90, waiting_tokens=3000)),
        member(ROLE_PREFILL, WorkerLoad(total_pages=300, free_pages=210)),
        member(ROLE_PREFILL, WorkerLoad(total_pages=100), INSTANCE_STATE_DRAINING),
        member(ROLE_DECODE, WorkerLoad(total_pages=10, free_pages=5)),
    ]
    at_once(world.history.sample(BEGUN_S))
    at_once(world.history.sample(BEGUN_S + INTERVAL_S))
    series = at_once(world.history.charts())["series"]
    pools = {name: each["values"] for name, each in series.items() if name.startswith(("kv_", "queue_"))}
    assert pools == {"kv_prefill": [0.25], "kv_decode": [0.5], "queue_prefill": [1.5]}


def test_a_late_sample_is_spread_over_what_it_covers() -> None:
    world = World()
    at_once(world.history.sample(BEGUN_S + 0.01))
    for _ in range(30):
        world.serve(0.1)
    at_once(world.history.sample(BEGUN_S + 3 * INTERVAL_S + 1.9))
    assert values(world, "requests") == [2.0, 2.0, 2.0]
    assert values(world, "ttft_p95") == [pytest.approx(0.0975)] * 3


def test_two_samples_of_one_interval_lose_nothing() -> None:
    world = World()
    at_once(world.history.sample(BEGUN_S))
    world.serve(0.1)
    at_once(world.history.sample(BEGUN_S + 1.0))  # too early for the first interval
    world.serve(0.1)
    at_once(world.history.sample(BEGUN_S + INTERVAL_S))
    assert values(world, "requests") == [0.4]


def test_the_last_hour_is_kept_in_memory_that_was_taken_at_once() -> None:
    world = World()
    before = world.history.nbytes
    assert before < 256 << 10
    for number in range(NUM_INTERVALS + 100):
        at_once(world.history.sample(BEGUN_S + number * INTERVAL_S))
        world.serve(0.1, prompt=(number, 0))
    charts = at_once(world.history.charts())
    assert charts["begun_unix_s"] == BEGUN_S + 99 * INTERVAL_S
    numbers = [number / INTERVAL_S for number in range(99, 99 + NUM_INTERVALS)]
    assert charts["series"]["prompt_tokens"]["values"] == pytest.approx(numbers)
    assert world.history.nbytes == before


def test_a_clock_that_is_set_back_far_begins_anew_and_one_that_is_set_back_a_little_is_waited_for() -> None:
    world = World()
    for number in (0, 1, 2, -1, 0, 3):
        at_once(world.history.sample(BEGUN_S + number * INTERVAL_S))
    assert len(values(world, "requests")) == 3
    at_once(world.history.sample(BEGUN_S - 1000))
    assert values(world, "requests") == []
    at_once(world.history.sample(BEGUN_S - 1000 + INTERVAL_S))
    assert len(values(world, "requests")) == 1


def test_before_the_first_sample_there_is_nothing() -> None:
    world = World()
    assert values(world, "ttft_p50") == []
    assert world.history.tokens(60.0) == Tokens(0, 0)


def test_samples_are_taken_where_intervals_begin() -> None:
    assert World().history.pause_s(BEGUN_S + 1.25) == 3.75


def test_tokens_of_a_window_are_those_of_its_intervals() -> None:
    world = World()
    for number in range(10):
        at_once(world.history.sample(BEGUN_S + number * INTERVAL_S))
        world.serve(0.1, prompt=(1000, 10 * number))
    assert world.history.tokens(3 * INTERVAL_S) == Tokens(3000, 60 + 70 + 80)
    assert world.history.tokens(1e9) == Tokens(9000, 360)


def test_processes_together_are_as_one_that_served_all() -> None:
    """Rates and counts of buckets add up, and quantiles are made of the sums: the mean of two quantiles is none."""
    rng, parts, whole = random.Random(3), [World(), World(), World()], World()
    for number in range(20):
        for world in (*parts, whole):
            at_once(world.history.sample(BEGUN_S + number * INTERVAL_S))
        for _ in range(rng.randrange(40)):
            ttft_s, tpot_s, outcome = rng.expovariate(8), rng.expovariate(30), rng.choice(["ok"] * 5 + ["error"])
            for world in (rng.choices(parts, (8, 1, 1))[0], whole):
                if outcome == "ok":
                    world.serve(ttft_s, 4, tpot_s, (700, 300))
                else:
                    world.fail(outcome)
    together, alone = (
        at_once(charts_of([at_once(world.history.counts()) for world in parts])),
        at_once(whole.history.charts()),
    )
    assert together["begun_unix_s"] == alone["begun_unix_s"]
    assert together["series"].keys() == alone["series"].keys()
    for name, series in alone["series"].items():
        assert together["series"][name]["values"] == [
            None if value is None else pytest.approx(value, rel=1e-4) for value in series["values"]
        ], name


def test_processes_that_began_or_told_at_other_times_are_laid_on_each_other() -> None:
    old, new = World(), World()
    for number in range(6):
        at_once(old.history.sample(BEGUN_S + number * INTERVAL_S))
        old.serve(0.1)
    for number in (3, 4):  # it has not told of the last interval yet
        at_once(new.history.sample(BEGUN_S + number * INTERVAL_S))
        new.serve(0.1)
    charts = at_once(charts_of([at_once(each.history.counts()) for each in (new, old)]))
    assert charts["begun_unix_s"] == BEGUN_S
    assert charts["series"]["requests"]["values"] == [0.2, 0.2, 0.2, 0.4]


def test_a_process_that_has_stopped_holds_nobody_up() -> None:
    stopped, other = World(), World()
    for number in range(10):
        at_once(other.history.sample(BEGUN_S + number * INTERVAL_S))
        if number < 3:
            at_once(stopped.history.sample(BEGUN_S + number * INTERVAL_S))
    charts = at_once(charts_of([at_once(each.history.counts()) for each in (stopped, other)]))
    assert len(charts["series"]["requests"]["values"]) == 9


def test_a_process_of_another_version_with_other_buckets_is_left_out() -> None:
    ours, theirs = World(), World()
    for world in (ours, theirs):
        at_once(world.history.sample(BEGUN_S))
        world.serve(0.1)
        at_once(world.history.sample(BEGUN_S + INTERVAL_S))
    counts = at_once(theirs.history.counts())
    counts["bounds"] = {"ttft": [1.0], "itl": [1.0]}
    assert at_once(charts_of([at_once(ours.history.counts()), counts])) == at_once(ours.history.charts())


@pytest.mark.parametrize("bounds", [TTFT_BOUNDS, ITL_BOUNDS])
@pytest.mark.parametrize("q", [0.5, 0.95])
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(bounds: tuple[float, ...], q: float) -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        sample = np.sort(rng.exponential(0.1, 200))
        counts = np.histogram(sample, [0.0, *bounds, np.inf])[0].astype(np.float64)
        (found,) = quantile(q, bounds, counts[None])
        exact = sample[int(np.ceil(q * len(sample))) - 1]
        bucket = np.searchsorted(bounds, exact)
        assert [0.0, *bounds][bucket] <= found <= [*bounds, bounds[-1]][bucket]


def test_beyond_all_bounds_a_quantile_is_the_last_one_and_of_nothing_there_is_none() -> None:
    found = quantile(0.5, (1.0, 2.0), np.array([[0.0, 0.0, 4.0], [0.0, 0.0, 0.0], [2.0, 2.0, 0.0]]))
    assert found[0] == 2.0
    assert np.isnan(found[1])
    assert found[2] == 1.0
