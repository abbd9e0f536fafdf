"""A worker is killed and started at the same address, again and again. Nobody takes it for its former self."""

from __future__ import annotations

from diptych.v1.bootstrap_pb2 import Instance
from drill.cluster import Worker
from drill.drill import Drill, Scenario


async def run(drill: Drill) -> None:
    workers = [drill.cluster.of_role(role)[0] for role in ("prefill", "decode")]
    former = [(await worker.status()).instance for worker in workers]
    slowest_s = 0.0
    for number in range(drill.lengths.restarts):
        worker = workers[number % 2]
        worker.kill()
        worker.start()
        slowest_s = max(slowest_s, await drill.cluster.wait_until_well())
        former.append(await _check(drill, worker, former))
        await drill.traffic.next_tokens()
    drill.counts |= {"restarts": drill.lengths.restarts, "slowest start, s": round(slowest_s, 2)}


async def _check(drill: Drill, worker: Worker, former: list[Instance]) -> Instance:
    """Whoever serves there now is new to all, and its peers are linked to it alone. Return its record."""
    instance: Instance = (await worker.status()).instance
    ids = {each.instance_id for each in former}
    metadata = {each.transfer.engine_metadata for each in former}
    drill.complain_unless(instance.instance_id not in ids, f"{worker} has the id of a former one")
    drill.complain_unless(instance.transfer.engine_metadata not in metadata, f"{worker} has a former one's metadata")
    for status in await drill.cluster.statuses():
        linked = {link.peer_instance_id for link in status.links}
        is_peer = status.instance.role != instance.role
        drill.complain_unless(
            (instance.instance_id in linked) is is_peer, f"{status.instance.address}: no new link to {worker}"
        )
    listed = [each.instance_id for each in await drill.cluster.members() if each.address == worker.address]
    drill.complain_unless(listed == [instance.instance_id], f"at the address of {worker} are listed {listed}")
    return instance


SCENARIO = Scenario("same-address", run)
