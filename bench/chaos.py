"""The whole platform under traffic with known answers, while its components are restarted, scaled, killed and cut off.

Two of each: bootstrap replicas, routers, prefill and decode workers; 16 clients, in short 2, that always have a greedy
request open, whose answers one engine alone gave before. As root each component is a host of its own (a network
namespace), and links are cut as well; else those faults are left out.

    python bench/chaos.py --scenario rolling-restart
    python bench/chaos.py --long

Exit code 0 means: no wrong token, every request answered, and after each scenario no room is open, no page is held and
none has leaked. `drill/scenarios` says what each scenario asks beyond that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from drill.cluster import Cluster, Sizes
from drill.drill import LONG, SHORT, Drill, Scenario, play
from drill.network import Network
from drill.questions import Question, make_questions, write_model
from drill.scenarios import faults, intruder, kills, no_bootstrap, reconfigure, rolling_restart, same_address, scale
from drill.service import Service
from drill.traffic import Traffic

SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        rolling_restart.SCENARIO,
        scale.SCENARIO,
        kills.SCENARIO,
        no_bootstrap.SCENARIO,
        same_address.SCENARIO,
        reconfigure.SCENARIO,
        intruder.SCENARIO,
        faults.SCENARIO,
    )
}
ISOLATED_VARIABLE: Final = "DIPTYCH_CHAOS_ISOLATED"

Outcome = dict[str, Any]  # of a scenario: counts and problems


async def run(
    start: Callable[[], Cluster], questions: Sequence[Question], scenarios: Sequence[Scenario], args: argparse.Namespace
) -> dict[str, Outcome]:
    """Play the scenarios one after another on one platform, and close it: also when the drill is ended early."""
    end_by_cancelling()
    cluster = start()
    try:
        return await _play_all(cluster, questions, scenarios, args)
    finally:
        cluster.close()  # here, as what waits in threads for a component would else keep the loop


def end_by_cancelling() -> None:
    """A signal ends this task where it waits: not in the midst of a start, whose process nobody would know yet."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _play_all(
    cluster: Cluster, questions: Sequence[Question], scenarios: Sequence[Scenario], args: argparse.Namespace
) -> dict[str, Outcome]:
    rng = random.Random(args.seed)
    service = Service(cluster.routers, rng)
    traffic = Traffic(service, questions, rng)
    outcomes: dict[str, Outcome] = {}
    async with asyncio.TaskGroup() as group:
        probing = group.create_task(service.run())
        for scenario in scenarios:
            logging.info("scenario %s", scenario.name)
            drill = Drill(cluster, traffic, rng, LONG if args.long else SHORT)
            try:
                await play(scenario, drill)
            except Exception as error:  # the other scenarios are worth playing all the same
                logging.exception("%s failed", scenario.name)
                drill.problems.append(f"{type(error).__name__}: {error}")
            outcomes[scenario.name] = {"counts": drill.counts, "problems": drill.problems}
            if not args.json:
                show(scenario.name, drill)
        probing.cancel()
    return outcomes


def show(name: str, drill: Drill) -> None:
    print(f"\n== {name}")
    print(*(f"{what:40} {count:>8}" for what, count in drill.counts.items()), sep="\n")
    print(*(f"PROBLEM: {problem}" for problem in drill.problems), sep="\n", flush=True)


def isolate() -> None:
    """Go on in network and mount namespaces that end with this process."""
    if Network.is_possible() and ISOLATED_VARIABLE not in os.environ:
        os.environ[ISOLATED_VARIABLE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=(*SCENARIOS, "all"), default="all", nargs="+", metavar="NAME")
    parser.add_argument("--long", action="store_true", help="as often and as long as `make chaos` does")
    parser.add_argument("--transports", choices=("auto", "shm", "tcp"), default="tcp", help="of the workers")
    parser.add_argument(
        "--device", choices=("cpu", "sim"), default="cpu", help="of the workers; sim: no torch, fast starts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the outcomes as one JSON object")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all components and of the drill")
    return parser.parse_args()


def main() -> int:
    args = parse()
    isolate()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=folder / "drill.log", level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        model = write_model(folder / "model")
        questions = make_questions(model, args.device, random.Random(args.seed))
        wanted = list(SCENARIOS) if "all" in args.scenario else args.scenario
        start = partial(Cluster, folder, model, args.transports, args.device, Sizes())
        try:
            outcomes = asyncio.run(run(start, questions, [SCENARIOS[name] for name in wanted], args))
        except asyncio.CancelledError:
            return 1  # told to end
    if args.json:
        print(json.dumps(outcomes))
    return int(any(outcome["problems"] for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
