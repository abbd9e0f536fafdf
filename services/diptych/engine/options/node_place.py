"""Which part of a group over several nodes a process belongs to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node's place among those of its group, which have equally many ranks each."""

    node: int  # 0: the leader, which has rank 0
    num_nodes: int
    host: str  # IP address at which rank 0 listens
    interface: str  # network device of this node, for what ranks add up
    ports: Mapping[str, int] = field(default_factory=dict)  # of rank 0, by channel, for ranks on other nodes
    wait_s: float = 600.0  # that ranks get to reach rank 0, from when it listens

    def ranks(self, num_ranks: int) -> range:
        """Return the ranks that are here, of those of all nodes."""
        return ranks_of_node(self.node, self.num_nodes, num_ranks)


def ranks_of_node(node: int, num_nodes: int, num_ranks: int) -> range:
    share = num_ranks // num_nodes
    return range(node * share, (node + 1) * share)


def cuts_stages(tp: int, share: int) -> bool:
    """Whether nodes of `share` ranks, counted stage by stage, would have a part of a stage of `tp` beside another one.

    Else a node has whole stages, or a stage has whole nodes.
    """
    return bool(share % tp and tp % share)
