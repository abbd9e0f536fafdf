"""How many workers nodes have room for: several on a node, or each on several nodes that are all its own. Pure.

A node that a group takes is whole: the GPUs of a worker over nodes are a multiple of what a node has, as all its nodes
have equally many ranks. A smaller worker never spans nodes, so GPUs of a node that are too few for one stay unused.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.engine.options.node_place import cuts_stages


@dataclass(frozen=True, slots=True)
class Nodes:
    """Machines that are alike, by their GPUs."""

    gpus: int  # of all
    gpus_per_node: int  # 0: nobody said, and GPUs are counted as if they were of one node
    tp: int  # GPUs of a worker's stage
    pp: int = 1  # stages of a worker

    @property
    def gpus_per_worker(self) -> int:
        return self.tp * self.pp

    def validate(self) -> None:
        """Raise `ConfigError` for a worker that can't be placed, or a part of a node."""
        check_placed(self.tp, self.gpus_per_node, self.pp)
        if self.gpus < (least := self.gpus_per_worker):
            raise ConfigError(f"--gpus must be {least} at least, the GPUs of one worker, not {self.gpus}")
        if self.gpus_per_node and self.gpus % self.gpus_per_node:
            words = f"--gpus {self.gpus} is no multiple of --gpus-per-node {self.gpus_per_node}"
            raise ConfigError(f"{words}: nodes are counted whole")

    @property
    def per_worker(self) -> int:
        """Return the nodes of one worker."""
        return num_nodes(self.gpus_per_worker, self.gpus_per_node)

    @property
    def most_workers(self) -> int:
        """Return for how many workers there is room."""
        if not self.gpus_per_node:
            return self.gpus // self.gpus_per_worker
        return self.gpus // self.gpus_per_node * self._per_node // self.per_worker

    def taken(self, workers: int) -> int:
        """Return the nodes that so many workers take, where `gpus_per_node` is said. Several may be on one."""
        return -(-workers // self._per_node) * self.per_worker

    @property
    def _per_node(self) -> int:
        """Return the workers of a node, or of the nodes that one worker takes."""
        return max(1, self.gpus_per_node // self.gpus_per_worker)


def num_nodes(num_gpus: int, gpus_per_node: int) -> int:
    """Return the nodes of a worker of so many GPUs; one where nobody says how many GPUs a node has."""
    return -(-num_gpus // gpus_per_node) if gpus_per_node else 1


def check_placed(tp: int, gpus_per_node: int, pp: int = 1) -> None:
    """Raise `ConfigError` for a worker that neither fits a node nor fills several, or whose stages would be cut."""
    if gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node must not be negative, as {gpus_per_node} is")
    if not gpus_per_node or tp * pp <= gpus_per_node:
        return
    gpus = f"--tp {tp}" + (f" times --pp {pp}" if pp > 1 else "")
    if tp * pp % gpus_per_node:
        words = f"{gpus} is no multiple of --gpus-per-node {gpus_per_node}"
        raise ConfigError(f"{words}, and a worker over several nodes has equally many GPUs on each")
    if cuts_stages(tp, gpus_per_node):
        words = f"stages of --tp {tp} do not fill nodes of --gpus-per-node {gpus_per_node}"
        raise ConfigError(f"{words}: a node has whole stages, or a stage whole nodes")
