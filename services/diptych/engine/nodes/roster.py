"""Which nodes of a group are here, as its leader knows it. Pure: it is told the time.

A node joins once. A group that has lost one has ended: a node that starts again belongs to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from diptych.common.errors import ConfigError, DiptychError, Unavailable
from diptych.engine.nodes.agreement import difference
from diptych.engine.options.node_place import ranks_of_node
from diptych.v1.bootstrap_pb2 import GroupNode
from diptych.v1.rank_pb2 import NodeHello

BEAT_S: Final = 0.25  # at which each end of a stream says something
QUIET_S: Final = 1.0  # after which a node is blamed if the group does not compute
SILENCE_S: Final = (
    5.0  # after which the other end is gone; a process that ends closes its connection, and is so at once
)


class PlaceTaken(DiptychError):
    """Another node has the number of this one, or the same one had it before its connection broke."""

    http_status = 409
    grpc_status: ClassVar[str] = "ALREADY_EXISTS"


@dataclass(slots=True)
class _Node:
    hello: NodeHello
    heard_s: float
    is_stopped: bool = False  # a rank of it was, by its own word

    def __str__(self) -> str:
        pod = f" ({self.hello.pod})" if self.hello.pod else ""
        return f"node {self.hello.node} at {self.hello.host}{pod}"


class Roster:
    """The nodes of one group."""

    def __init__(self, ours: NodeHello, num_ranks: int, deadline_s: float) -> None:
        """`num_ranks`: of all nodes. `deadline_s`: when all must be here."""
        self._ours = ours
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._nodes: dict[int, _Node] = {}
        self._is_over = False

    def join(self, hello: NodeHello, now_s: float) -> None:
        """Raises `ConfigError` for a node that never can, `PlaceTaken`, and `Unavailable` where it may try again."""
        if words := difference(self._ours, hello):
            raise ConfigError(f"{_Node(hello, now_s)} can't join the group of {self._ours.host}: {words}")
        if self._is_over:
            raise Unavailable(f"the group of {self._ours.host} ends: join the next one")
        if there := self._nodes.get(hello.node):
            words = f"{there} is in the group already, started as {there.hello.epoch:016x}"
            raise PlaceTaken(f"{words}: give each node a --node-rank of its own")
        self._nodes[hello.node] = _Node(hello, now_s)

    def heard(self, node: int, now_s: float, *, is_stopped: bool = False) -> None:
        """`is_stopped`: a rank there was stopped by a signal."""
        self._nodes[node].heard_s = now_s
        self._nodes[node].is_stopped = is_stopped

    def excuse(self, stalled_s: float) -> None:
        """Nobody could be heard for so long, because we did not listen."""
        for node in self._nodes.values():
            node.heard_s += stalled_s

    def absence(self, now_s: float) -> str:
        """Return whose fault it may be that ranks here wait, though all may go on yet; empty: nobody's."""
        for node in self._nodes.values():
            if node.is_stopped:
                return f"a process of {node} was stopped"
            if now_s - node.heard_s > QUIET_S:
                return f"{node} is not heard"
        return ""

    def complaint(self, now_s: float) -> str:
        """Return why the group is over, by who is not heard; empty: it is not."""
        for node in self._nodes.values():
            if now_s - node.heard_s > SILENCE_S:
                return f"{node} has not been heard for {now_s - node.heard_s:.1f} s"
        if self.missing and now_s > self._deadline_s:
            which = ", ".join(map(str, self.missing))
            return f"node {which} did not come in time: start it with --leader of this one, or raise --node-wait-s"
        return ""

    def end(self) -> None:
        """Nobody joins any more."""
        self._is_over = True

    def name(self, node: int) -> str:
        return str(self._nodes[node])

    @property
    def missing(self) -> list[int]:
        return [node for node in range(1, self._ours.num_nodes) if node not in self._nodes]

    def records(self) -> list[GroupNode]:
        """Return what others may know of the nodes that are here, the leader first."""
        hellos = (self._ours, *(self._nodes[node].hello for node in sorted(self._nodes)))
        return [self._record(hello) for hello in hellos]

    def _record(self, hello: NodeHello) -> GroupNode:
        ranks = ranks_of_node(hello.node, hello.num_nodes, self._num_ranks)
        return GroupNode(
            node=hello.node,
            epoch=hello.epoch,
            host=hello.host,
            pod=hello.pod,
            first_rank=ranks[0],
            num_ranks=len(ranks),
        )
