"""A worker is killed and started at the same address, again and again. Nobody takes it for its former self."""

from __future__ import annotations

from diptych.common.members.roles import WORKER_ROLES
from diptych.v1.bootstrap_pb2 import Instance
from drill.cluster import Worker
from drill.drill import Drill, Scenario


async def run(drill: Drill) -> None:
    workers = [drill.cluster.of_role(role)[0] for role in ("prefill", "decode")]
    former = [each for worker in workers for each in await _listed(drill, worker)]
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
    listed, instance_id = await _listed(drill, worker), (await worker.status()).instance.instance_id
    found = [each.instance_id for each in listed]
    drill.complain_unless(found == [instance_id], f"at the address of {worker} are listed {found}, not {instance_id}")
    instance, ids = listed[0], {each.instance_id for each in former}
    metadata = {each.transfer.engine_metadata for each in former}
    drill.complain_unless(instance.instance_id not in ids, f"{worker} has the id of a former one")
    drill.complain_unless(instance.transfer.engine_metadata not in metadata, f"{worker} has a former one's metadata")
    for status in await drill.cluster.statuses():
        linked = {link.peer_instance_id for link in status.links}
        ours, theirs = (WORKER_ROLES[each.role] for each in (status.instance, instance))
        is_peer = ours.links_with(theirs) and status.instance.instance_id != instance.instance_id
        drill.complain_unless(
            (instance.instance_id in linked) is is_peer, f"{status.instance.address}: no new link to {worker}"
        )
    return instance


async def _listed(drill: Drill, worker: Worker) -> list[Instance]:
    """Return who is at its address, as bootstrap tells peers."""
    return [each for each in await drill.cluster.members() if each.address == worker.address]


SCENARIO = Scenario("same-address", run)
