"""kill -9 of a prefill worker, a decode worker, a bootstrap replica and a router, in random order, again and again.

Those who were not killed are never restarted, and nothing fails but what a killed router held.
"""

from __future__ import annotations

from drill.cluster import Router
from drill.component import Component
from drill.drill import Drill, Scenario
from drill.recovery import recovery


async def run(drill: Drill) -> None:
    recoveries: dict[str, list[float]] = {}
    for _ in range(drill.lengths.kills):
        for victim in drill.rng.sample(_victims(drill), 4):
            recoveries.setdefault(victim.kind, []).append(await _kill(drill, victim))
    everything = sorted(recovery for times in recoveries.values() for recovery in times)
    drill.counts |= {
        "kills": len(everything),
        **{f"slowest recovery from {kind}, s": round(max(times), 2) for kind, times in sorted(recoveries.items())},
        "recovery p50, s": round(everything[len(everything) // 2], 2),
        "recovery p99, s": round(everything[int(len(everything) * 0.99)], 2),
    }


def _victims(drill: Drill) -> list[Component]:
    cluster, rng = drill.cluster, drill.rng
    kinds = (cluster.of_role("prefill"), cluster.of_role("decode"), cluster.bootstraps, cluster.routers)
    return [rng.choice(kind) for kind in kinds]


async def _kill(drill: Drill, victim: Component) -> float:
    """Kill, measure, start again; return after how many seconds all went on."""
    others = {each: each.pids for each in drill.cluster.components if each is not victim}
    if isinstance(victim, Router):
        drill.traffic.note_killed(victim)
    victim.kill()
    recovery_s = await recovery(drill, str(victim))
    victim.start()
    await drill.cluster.wait_until_well()
    restarted = [str(each) for each, pids in others.items() if each.pids != pids]
    drill.complain_unless(not restarted, f"{victim} was killed, and {restarted} restarted")
    return recovery_s


SCENARIO = Scenario("kills", run)
