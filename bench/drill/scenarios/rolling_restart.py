"""Every component is restarted, one after another, as for a new version: no request fails."""

from __future__ import annotations

from drill.drill import Drill, Scenario

GONE_S = 180.0  # longer than any component drains


async def run(drill: Drill) -> None:
    exits, starts = [], []
    for component in drill.cluster.components:
        exits.append(await component.leave(GONE_S))
        component.start()
        starts.append(await drill.cluster.wait_until_well())
    drill.counts |= {"slowest exit, s": round(max(exits), 2), "slowest start, s": round(max(starts), 2)}


SCENARIO = Scenario("rolling-restart", run)
