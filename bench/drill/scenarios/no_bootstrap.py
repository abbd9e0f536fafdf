"""All bootstrap replicas are away for a while. Serving goes on, and who dies meanwhile is noticed by peers and routers.

The dead are started again, and load, while nobody can name them to others; they serve soon after bootstrap is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable, Sequence

from diptych.v1.worker_pb2 import LINK_STATE_UP
from drill.cluster import HUNG_S, NoAnswer, Worker, until
from drill.drill import Drill, Scenario
from drill.recovery import recovery


async def run(drill: Drill) -> None:
    cluster, began_s = drill.cluster, time.monotonic()
    for replica in cluster.bootstraps:
        replica.kill()
    for role in ("prefill", "decode"):
        await asyncio.sleep(drill.lengths.away_s / 5)
        await _lose_one(drill, role)
    await asyncio.sleep(max(0.0, began_s + drill.lengths.away_s - time.monotonic()))
    await until(lambda: _unanswered(worker.status() for worker in cluster.workers), HUNG_S)
    for replica in cluster.bootstraps:
        replica.start()
    await until(lambda: _unanswered(replica.members() for replica in cluster.bootstraps), HUNG_S)
    drill.counts["well after bootstrap was back, s"] = round(await cluster.wait_until_well(), 2)


async def _lose_one(drill: Drill, role: str) -> None:
    cluster = drill.cluster
    victim = drill.rng.choice(cluster.of_role(role))
    peers = [worker for worker in cluster.workers if worker.kind != role]
    instance_id = (await victim.status()).instance.instance_id
    victim.kill()
    drill.counts[f"recovery from the death of {role}, s"] = round(await recovery(drill, str(victim)), 2)
    noticed_s = await until(lambda: _still_linked(peers, instance_id), HUNG_S)
    drill.counts[f"... until its links were down, s ({role})"] = round(noticed_s, 2)
    victim.start()


async def _still_linked(peers: Sequence[Worker], instance_id: int) -> str:
    """Peers that have a link to an instance, in words. One that has been killed, too, may not serve yet."""
    linked = []
    for peer in peers:
        with contextlib.suppress(NoAnswer):
            links = (await peer.status()).links
            linked += [
                str(peer) for link in links if link.peer_instance_id == instance_id and link.state == LINK_STATE_UP
            ]
    return f"linked to the dead: {linked}" if linked else ""


async def _unanswered(questions: Iterable[Awaitable[object]]) -> str:
    try:
        for question in questions:
            await question
    except NoAnswer as error:
        return str(error)
    return ""


SCENARIO = Scenario("no-bootstrap", run)
