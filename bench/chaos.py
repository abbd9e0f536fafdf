"""A fault every second while requests run: kills, stops, cut links, clients that leave. Nothing may be wrong or left.

Two prefill and two decode workers serve greedy requests whose answers one engine alone gave before. As root each worker
is a host of its own (a network namespace), and links are cut as well; else that fault is left out.

    python bench/chaos.py --requests 1000

Exit code 0 means: no wrong token, every request answered or refused in words, and `SETTLED_S` after the last fault no
room is open, no page is held and none has leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from chaos_cluster import Cluster, NoAnswer
from chaos_faults import Faults
from chaos_load import Load, Question, Tally
from chaos_network import Network

from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.v1.worker_pb2 import WorkerStatus

READY_TIMEOUT_S: Final = 90.0
SETTLED_S: Final = 5.0  # from the last fault until nothing is left of it
NUM_QUESTIONS: Final = 100
ANSWER_LENS: Final = (4, 60, 300)
ISOLATED_VARIABLE: Final = "DIPTYCH_CHAOS_ISOLATED"


@dataclass(slots=True)
class Outcome:
    """What is reported."""

    counts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def drill(cluster: Cluster, questions: list[Question], args: argparse.Namespace) -> Outcome:
    """Run load and faults; wait until all has settled; return what came of it."""
    rng = random.Random(args.seed)
    load = Load(cluster.url, questions, random.Random(rng.random()), args.requests)
    await _until(lambda: _not_well(cluster), READY_TIMEOUT_S)
    began_s = time.monotonic()
    faults = Faults(cluster, load, rng)
    striking = asyncio.create_task(faults.run())
    await load.run(args.rate)
    striking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await striking
    struck_s = time.monotonic()
    outcome = Outcome()
    try:
        await _until(lambda: _unsettled(cluster), SETTLED_S)
    except TimeoutError as error:
        outcome.problems.append(f"not settled: {error}")
    settled_s = time.monotonic() - struck_s
    outcome.counts = {
        **_counts(load.tally),
        **await _router_counts(cluster.url),
        **{f"fault: {kind}": count for kind, count in sorted(faults.counts.items())},
        "worker starts": sum(worker.num_starts for worker in cluster.workers),
        "seconds": round(struck_s - began_s, 1),
        "settled after, s": round(settled_s, 2),
    }
    outcome.problems += [*load.tally.wrong, *load.tally.unanswered]
    await _aftermath(cluster, questions, outcome)
    return outcome


async def _aftermath(cluster: Cluster, questions: list[Question], outcome: Outcome) -> None:
    """With every worker back, all is as it was: answers are right, books balance."""
    await _until(lambda: _not_well(cluster), READY_TIMEOUT_S)
    load = Load(cluster.url, questions, random.Random(0), 20)
    await load.run(20.0)
    if load.tally.answered != 20:
        outcome.problems.append(f"after the faults: {load.tally}")
    statuses = await cluster.statuses()
    outcome.problems += [problem for status in statuses for problem in status.problems]
    outcome.counts |= {
        "stuck rooms": sum(status.open_rooms for status in statuses),
        "leaked pages": sum(status.leaks_found + sum(_held(status).values()) for status in statuses),
        "integrity failures": sum(status.integrity_failures for status in statuses),
    }
    for name in ("stuck rooms", "leaked pages", "integrity failures", "digests that differ"):
        if outcome.counts[name]:
            outcome.problems.append(f"{name}: {outcome.counts[name]}")


def _counts(tally: Tally) -> dict[str, Any]:
    return {
        "offered": tally.offered,
        "answered": tally.answered,
        "left by their clients": tally.left,
        "failed": tally.failed.total(),
        **{f"failed with status {status}": count for status, count in sorted(tally.failed.items())},
        "wrong": len(tally.wrong),
        "unanswered": len(tally.unanswered),
        "pages moved": tally.pages_moved,
        "digests that differ": tally.digests_differ,
        "slowest, s": round(tally.slowest_s, 2),
    }


async def _router_counts(url: str) -> dict[str, int]:
    """Attempts that the router tried again, before and after the first token."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text

    def total(name: str) -> int:
        return sum(int(float(each)) for each in re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    retries, replays = total("diptych_router_retries"), total("diptych_router_replays")
    return {"retried before the first token": retries - replays, "continued after it": replays}


async def _not_well(cluster: Cluster) -> str:
    cluster.restart_dead()
    well = await cluster.well()
    return ", ".join(f"{each} is not linked to all" for each in cluster.workers if each.address not in well)


async def _unsettled(cluster: Cluster) -> str:
    """What is left of requests that have ended."""
    try:
        statuses = await cluster.statuses()
    except NoAnswer as error:
        return str(error)
    return "; ".join(
        f"{status.instance.address} has {status.open_rooms} rooms and {_held(status)}"
        for status in statuses
        if status.open_rooms or _held(status)
    )


def _held(status: WorkerStatus) -> dict[str, int]:
    """Pages that are not free, by state."""
    return {state: count for state, count in status.pages_by_state.items() if count and state not in ("free", "cached")}


async def _until(complaint: Callable[[], Awaitable[str]], timeout_s: float) -> None:
    """Return once there is no complaint. Raises `TimeoutError` with the last one."""
    deadline_s = time.monotonic() + timeout_s
    while words := await complaint():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {timeout_s:g} s: {words}")
        await asyncio.sleep(0.1)


def make_questions(model: Path, rng: random.Random) -> list[Question]:
    """Ask one engine alone. Some prompts begin alike, so that prefixes are cached."""
    common = [rng.randrange(1000) for _ in range(100)]
    prompts = [
        common[: rng.choice([0, 0, 50, 100])] + [rng.randrange(1000) for _ in range(rng.choice([3, 30, 100, 300]))]
        for _ in range(NUM_QUESTIONS)
    ]
    params = SamplingParams(max_tokens=max(ANSWER_LENS), temperature=0.0, ignore_eos=True)
    with Engine(str(model), EngineOptions(load_format="dummy", kv_cache_mib=64)) as engine:
        outputs = engine.generate_batch(prompts, params)
    answers = [output.token_ids[: rng.choice(ANSWER_LENS)] for output in outputs]
    return [Question(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def isolate() -> None:
    """Go on in network and mount namespaces that end with this process."""
    if Network.is_possible() and ISOLATED_VARIABLE not in os.environ:
        os.environ[ISOLATED_VARIABLE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--transports", choices=("auto", "shm", "tcp"), default="tcp", help="of the workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the counts as one JSON object")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all components and of the faults")
    args = parser.parse_args()
    isolate()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        logging.basicConfig(filename=folder / "faults", level=logging.INFO, format="%(asctime)s %(message)s")
        cluster = Cluster(folder, num_prefill=2, num_decode=2, transports=args.transports)
        try:
            questions = make_questions(cluster.model, random.Random(args.seed))
            outcome = asyncio.run(drill(cluster, questions, args))
        finally:
            cluster.close()
    if args.json:
        print(json.dumps({"counts": outcome.counts, "problems": outcome.problems}))
    else:
        print(*(f"{name:32} {count:>8}" for name, count in outcome.counts.items()), sep="\n")
        print(*(f"PROBLEM: {problem}" for problem in outcome.problems), sep="\n")
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main())
