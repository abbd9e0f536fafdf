"""A fault every second: kills, stops, cut links, isolated hosts, clients that leave. Each is healed some time later.

Rule: one worker of each role is left alone, so that requests can be answered.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from drill.cluster import Cluster, NoAnswer, Worker
from drill.drill import Drill, Scenario
from drill.network import Network
from drill.traffic import Traffic

logger = logging.getLogger("drill")

FAULT_EVERY_S: Final = 1.0
FAULT_LENGTHS_S: Final = (0.3, 1.0, 2.0, 4.0)
STALE_S: Final = 2.5  # after it, until everybody knows that it is over
SHARE_OF_CLIENTS: Final = 0.2  # of the faults; more when no worker may be struck

Heal = Callable[[], None]


async def run(drill: Drill) -> None:
    faults = Faults(drill.cluster, drill.traffic, drill.rng)
    await faults.run(drill.lengths.faults)
    drill.counts |= {f"fault: {kind}": count for kind, count in sorted(faults.counts.items())}
    drill.counts["worker starts"] = sum(worker.num_starts for worker in drill.cluster.workers)


class Faults:
    """What strikes a cluster, and what heals it again."""

    def __init__(self, cluster: Cluster, traffic: Traffic, rng: random.Random) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._rng = rng
        self._maimed: set[Worker] = set()
        self.counts: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """Strike `count` times, and wait until all is healed."""
        harms = ["kill", "stop", *(("cut", "isolate") if self._cluster.network else ())]
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as harming:
            for number in range(1, count + 1):
                await asyncio.sleep(began_s + number * FAULT_EVERY_S - time.monotonic())
                victim = await self._victim()
                if victim is None or self._rng.random() < SHARE_OF_CLIENTS:
                    await self._leave()
                else:
                    harming.create_task(self._harm(victim, self._rng.choice(harms)))

    async def _leave(self) -> None:
        count = self._rng.randint(1, 4)
        await self._traffic.leave(count)
        self._note("leave", f"{count} clients")

    async def _harm(self, victim: Worker, kind: str) -> None:
        """Do it, undo it some time later, and leave the victim alone until what is known of it is true again."""
        if kind == "cut" and not self._peers(victim):
            kind = "stop"
        self._maimed.add(victim)
        self._note(kind, str(victim))
        heal = self._strike(victim, kind)
        exited = victim.exited() if kind == "kill" else None  # now: who heals another one may start this one, too
        try:
            await asyncio.sleep(self._rng.choice(FAULT_LENGTHS_S))
            if exited is not None:
                await exited
        finally:
            heal()
        logger.info("healed %s", victim)
        await asyncio.sleep(STALE_S)
        self._maimed.remove(victim)

    def _strike(self, victim: Worker, kind: str) -> Heal:
        """Return what undoes it."""
        match kind, self._cluster.network:
            case "kill", _:
                victim.kill_one(self._rng)
                return self._cluster.restart_dead
            case "isolate", Network() as network:
                network.isolate(victim.host)
                return lambda: network.rejoin(victim.host)
            case "cut", Network() as network:
                peer = self._rng.choice(self._peers(victim))
                network.cut(victim.host, peer.host)
                return lambda: network.mend(victim.host, peer.host)
            case _:
                victim.freeze(self._rng)
                return victim.wake

    def _peers(self, victim: Worker) -> list[Worker]:
        """Those whose links are whole."""
        return [each for each in self._cluster.workers if each.kind != victim.kind and each not in self._maimed]

    async def _victim(self) -> Worker | None:
        """A worker whose role has another one that is well and linked."""
        try:
            well = await self._cluster.well()
        except NoAnswer:
            return None
        fit = [each for each in self._cluster.workers if each.address in well and each not in self._maimed]
        victims = [each for each in fit if sum(other.kind == each.kind for other in fit) > 1]
        return self._rng.choice(victims) if victims else None

    def _note(self, what: str, whom: str) -> None:
        self.counts[what] += 1
        logger.info("%s %s", what, whom)


SCENARIO = Scenario("faults", run, may_fail=True)
