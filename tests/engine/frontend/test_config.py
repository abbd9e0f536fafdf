from __future__ import annotations

from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.frontend.config import WorkerConfig


def test_a_requirement_that_nobody_can_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-require shm needs --kv-backend ucx"):
        WorkerConfig(kv_backend="nixl", kv_require="shm").validate()
    WorkerConfig(kv_backend="nixl").validate()
    WorkerConfig(kv_require="rdma").validate()


def of_a_group(**changes: Any) -> WorkerConfig:
    return WorkerConfig(**{"tp": 4, "nnodes": 2, "leader": "127.0.0.1:7100", **changes})


def test_the_leader_of_a_group_serves_where_it_is_said_to() -> None:
    of_a_group().validate()
    assert of_a_group().own_port == 7100
    assert of_a_group(node_rank=1).own_port == 0
    assert WorkerConfig(port=5).own_port == 5


@pytest.mark.parametrize(("tp", "pp", "nnodes"), [(4, 2, 2), (1, 2, 2), (2, 4, 2), (4, 2, 4)])
def test_nodes_have_whole_stages_or_stages_whole_nodes(tp: int, pp: int, nnodes: int) -> None:
    of_a_group(tp=tp, pp=pp, nnodes=nnodes).validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"leader": ""}, "--nnodes 2 needs --leader HOST:PORT"),
        ({"leader": "host:port"}, "--nnodes 2 needs --leader HOST:PORT"),
        ({"node_rank": 2}, "--node-rank is 2: of --nnodes 2 they are 0 and up"),
        ({"tp": 3}, "--tp 3 can't be divided among --nnodes 2"),
        ({"dp": 2}, "--nnodes needs --dp 1"),
        ({"tp": 1, "pp": 3}, "--tp 1 times --pp 3 can't be divided among --nnodes 2"),
        ({"tp": 2, "pp": 3}, "a node would have 3 ranks, so a stage would lie on two nodes, beside another one"),
        ({"port": 9}, "--port 9 of node 0 is not that of --leader"),
        ({"nnodes": 1}, "--leader is for a group over several nodes"),
        ({"node_wait_s": 0.0}, "--node-wait-s must be positive"),
        ({"leader": "10.0.0.1:7100"}, "nobody on another node reaches --host 127.0.0.1"),
    ],
)
def test_what_can_be_no_group_over_nodes_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of_a_group(**changes).validate()
