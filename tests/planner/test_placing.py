"""How many workers nodes have room for."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.planner.placing import Nodes


@pytest.mark.parametrize(
    ("gpus", "gpus_per_node", "tp", "most", "taken"),
    [
        (32, 8, 16, 2, [2, 4, 6]),  # a group has whole nodes
        (24, 8, 16, 1, [2, 4, 6]),  # and half a group is none
        (16, 8, 8, 2, [1, 2, 3]),
        (16, 8, 4, 4, [1, 1, 2]),
        (16, 8, 3, 4, [1, 1, 2]),  # no worker of three spans nodes: two GPUs of each stay unused
        (16, 8, 5, 2, [1, 2, 3]),
    ],
)
def test_groups_take_whole_nodes_and_smaller_workers_fit_one(
    gpus: int, gpus_per_node: int, tp: int, most: int, taken: list[int]
) -> None:
    nodes = Nodes(gpus, gpus_per_node, tp)
    nodes.validate()
    assert nodes.most_workers == most
    assert [nodes.taken(workers) for workers in (1, 2, 3)] == taken


def test_stages_are_gpus_of_a_worker() -> None:
    nodes = Nodes(24, 8, 1, 3)
    nodes.validate()
    assert (nodes.most_workers, nodes.per_worker) == (6, 1), "two GPUs of each node stay unused"
    assert Nodes(24, 0, 1, 3).most_workers == 8
    over_two = Nodes(32, 8, 4, 4)
    over_two.validate()
    assert (over_two.most_workers, over_two.per_worker) == (2, 2)


def test_gpus_are_counted_as_they_are_where_nobody_said_what_a_node_has() -> None:
    nodes = Nodes(15, 0, 2)
    nodes.validate()
    assert (nodes.most_workers, nodes.per_worker) == (7, 1)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (Nodes(32, 8, 12), "--tp 12 is no multiple of --gpus-per-node 8"),
        (Nodes(8, 8, 16), "--gpus must be 16 at least"),
        (Nodes(20, 8, 8), "--gpus 20 is no multiple of --gpus-per-node 8"),
        (Nodes(20, -1, 8), "--gpus-per-node must not be negative"),
        (Nodes(32, 8, 4, 3), "--tp 4 times --pp 3 is no multiple of --gpus-per-node 8, and a worker over several"),
        (Nodes(32, 8, 6, 4), "stages of --tp 6 do not fill nodes of --gpus-per-node 8: a node has whole stages"),
        (Nodes(7, 8, 4, 2), "--gpus must be 8 at least"),
    ],
)
def test_what_nodes_can_not_hold_is_refused_in_words(nodes: Nodes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        nodes.validate()
