"""One scenario under traffic: play it, let everything settle, and judge."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from diptych.v1.worker_pb2 import WorkerStatus
from drill.cluster import HUNG_S, READY_TIMEOUT_S, Cluster, NoAnswer, until
from drill.tally import Tally
from drill.traffic import Traffic

NUM_AFTERWARDS: Final = 5  # requests that must be answered when all is over
TRIED_AGAIN: Final = re.compile(r"leg: (\w+): .*; trying again")


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much of it; the scenarios say what of."""

    streams: int  # open at any time
    kills: int  # of each kind
    restarts: int  # at the same address
    away_s: float  # of bootstrap
    faults: int  # one a second
    answers: int  # at least, in each scenario


SHORT: Final = Lengths(streams=2, kills=1, restarts=2, away_s=6.0, faults=10, answers=16)
LONG: Final = Lengths(streams=16, kills=20, restarts=50, away_s=60.0, faults=120, answers=200)


@dataclass(slots=True)
class Drill:
    """What a scenario has at hand, and where it puts what it found."""

    cluster: Cluster
    traffic: Traffic
    rng: random.Random
    lengths: Lengths
    counts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def complain_unless(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that befalls the platform."""

    name: str
    run: Callable[[Drill], Awaitable[None]]
    may_fail: bool = False  # requests may end in words; never in a wrong token, never without an end


async def play(scenario: Scenario, drill: Drill) -> None:
    """Have it happen under traffic. All is well before, and must be after."""
    cluster, traffic = drill.cluster, drill.traffic
    await cluster.wait_until_well()
    retries_before, began_s = _retries(cluster), time.monotonic()
    traffic.start(drill.lengths.streams, drill.lengths.answers)
    try:
        await scenario.run(drill)
    finally:
        tally = await traffic.stop()
    drill.counts = {
        **tally.counts,
        **_retry_counts(_retries(cluster) - retries_before),
        **drill.counts,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    drill.problems += [*tally.wrong, *tally.unanswered, *tally.unmoved]
    drill.complain_unless(tally.answered >= drill.lengths.answers, f"only {tally.answered} requests were answered")
    drill.complain_unless(scenario.may_fail or not tally.failed, f"failed requests: {dict(tally.failed)}")
    await _settle(drill)
    await _aftermath(drill)


async def _settle(drill: Drill) -> None:
    try:
        await until(lambda: _silent(drill.cluster), READY_TIMEOUT_S)  # who was just started again has to load first
        drill.counts["settled after, s"] = round(await until(lambda: _unsettled(drill.cluster), HUNG_S), 2)
    except (NoAnswer, TimeoutError) as error:
        drill.problems.append(f"not settled: {error}")


async def _aftermath(drill: Drill) -> None:
    """With every component back, all is as it was: answers are right, books balance."""
    drill.cluster.restart_dead()
    await drill.cluster.wait_until_well()
    drill.traffic.start(0)
    for _ in range(NUM_AFTERWARDS):
        await drill.traffic.ask_once()
    after: Tally = await drill.traffic.stop()
    drill.complain_unless(after.answered == NUM_AFTERWARDS, f"afterwards: {after}")
    statuses = await drill.cluster.statuses()
    drill.problems += [problem for status in statuses for problem in status.problems]
    found = {
        "stuck rooms": sum(status.open_rooms for status in statuses),
        "leaked pages": sum(status.leaks_found + sum(_held(status).values()) for status in statuses),
        "integrity failures": sum(status.integrity_failures for status in statuses),
    }
    drill.counts |= found
    drill.problems += [f"{name}: {count}" for name, count in found.items() if count]
    drill.complain_unless(not drill.counts["digests that differ"], "digests differ")


async def _silent(cluster: Cluster) -> str:
    """Which worker does not answer, in words."""
    try:
        await cluster.statuses()
    except NoAnswer as error:
        return str(error)
    return ""


async def _unsettled(cluster: Cluster) -> str:
    """What is left of requests that have ended."""
    return "; ".join(
        f"{status.instance.address} has {status.open_rooms} rooms and {_held(status)}"
        for status in await cluster.statuses()
        if status.open_rooms or _held(status)
    )


def _held(status: WorkerStatus) -> dict[str, int]:
    """Pages that are not free, by state."""
    return {state: count for state, count in status.pages_by_state.items() if count and state not in ("free", "cached")}


def _retries(cluster: Cluster) -> Counter[str]:
    """How often routers tried again, by reason. From their logs: counters die with a router."""
    return Counter(reason for router in cluster.routers for reason in TRIED_AGAIN.findall(router.log.read_text()))


def _retry_counts(reasons: Counter[str]) -> dict[str, int]:
    handed_back = reasons.pop("HANDED_BACK", 0)
    return {"tried again by routers": reasons.total(), "handed back by workers": handed_back}
