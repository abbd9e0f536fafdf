"""What a node of a group starts with: where it is among the others, what it says of itself, who leads."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from diptych.checkpoints.source import ModelSource
from diptych.common.errors import Unavailable
from diptych.common.event_loop import Stop
from diptych.common.members.roles import Role
from diptych.common.version import own_version
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.nodes.agreement import PROTOCOL, shared_options
from diptych.engine.nodes.following import RETRY_S
from diptych.engine.nodes.interfaces import address_of, check_own, interface_towards, resolved
from diptych.engine.nodes.leading import GroupLeader
from diptych.engine.nodes.roster import Roster
from diptych.engine.options.node_place import NodePlace
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.rank_pb2 import NodeHello

_SHARED = ("kv_backend", "kv_integrity", "kv_layer_windows", "kv_pull")  # beside the options of the engine


@dataclass(frozen=True, slots=True)
class LeadNodes:
    """What makes the leader of a group, once it is known which instance it is."""

    roster: Roster
    place: NodePlace
    stop: Stop

    def of(self, instance: Instance) -> GroupLeader:
        """Return the leader; the record of the group names its nodes once all are there."""
        return GroupLeader(self.roster, instance.instance_id, self.place.host, self._on_leaving, instance.nodes.extend)

    def _on_leaving(self) -> None:
        """Have the node stop; told again, it is in a hurry."""
        (self.stop.hurry if self.stop.is_set() else self.stop).set()


async def lead_nodes(config: WorkerConfig, role: Role, source: ModelSource, stop: Stop) -> LeadNodes:
    """Return what leads the other nodes of a group.

    Raises `ConfigError`, and `Unavailable` where our own name gets no address in time.
    """
    deadline_s = time.monotonic() + config.node_wait_s
    roster = Roster(hello_of(config, role, source), config.num_ranks, deadline_s)
    return LeadNodes(roster, await _place_in_time(config, deadline_s), stop)


def hello_of(config: WorkerConfig, role: Role, source: ModelSource) -> NodeHello:
    others = {name: getattr(config, name) for name in _SHARED}
    return NodeHello(
        protocol=PROTOCOL,
        node=config.node_rank,
        num_nodes=config.nnodes,
        epoch=secrets.randbits(64),
        host=config.advertised_host,
        pod=config.pod_name,
        version=own_version(),
        model=f"{source.config.model_id} {source.weights_id}",
        options=shared_options(config.engine_options, role=role.value, **others),
    )


async def _place_in_time(config: WorkerConfig, deadline_s: float) -> NodePlace:
    """Names of pods may come later than the pods."""
    while True:
        try:
            return leader_place(config)
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


def leader_place(config: WorkerConfig) -> NodePlace:
    """Return the place of node 0: rank 0 listens at `--node-interface`, or where `--leader` leads to.

    Raises `Unavailable` where that is no address yet, or not of this machine: that of a pod that was here before.
    """
    named = resolved(config.leader.rpartition(":")[0])
    if config.node_interface:
        interface = config.node_interface
        host = address_of(interface, named)
    else:
        check_own(named)
        interface, host = interface_towards(named), named
    return NodePlace(0, config.nnodes, host, interface, wait_s=config.node_wait_s)


def follower_place(config: WorkerConfig, rank_0: str, ports: dict[str, int]) -> NodePlace:
    """Return the place of another node, told where rank 0 listens: an IP address, and its ports by channel."""
    interface = config.node_interface or interface_towards(rank_0)
    return NodePlace(config.node_rank, config.nnodes, rank_0, interface, ports)
