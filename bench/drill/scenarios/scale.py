"""Both pools grow from two to four workers, shrink to one by drains, and are two again: no request fails."""

from __future__ import annotations

from drill.cluster import ROLES
from drill.drill import Drill, Scenario

GONE_S = 180.0


async def run(drill: Drill) -> None:
    cluster = drill.cluster
    for role in (*ROLES, *ROLES):
        cluster.add_worker(role)
    grown_s = await cluster.wait_until_well()
    drains = []
    for role in (*ROLES, *ROLES, *ROLES):
        drains.append(await cluster.remove(drill.rng.choice(cluster.of_role(role)), GONE_S))
    await drill.traffic.next_tokens()
    for role in ROLES:
        cluster.add_worker(role)
    await cluster.wait_until_well()
    drill.counts |= {"grown after, s": round(grown_s, 2), "slowest drain, s": round(max(drains), 2)}


SCENARIO = Scenario("scale", run)
