from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.engine import EngineOptions
from diptych.engine.nodes.agreement import difference, shared_options
from diptych.v1.rank_pb2 import NodeHello

OPTIONS = EngineOptions(tp=4)


def hello(node: int, options: EngineOptions = OPTIONS, **changes: Any) -> NodeHello:
    fields = {"protocol": 1, "num_nodes": 2, "version": "1.0", "model": "tiny abc"}
    shared = shared_options(options, role="decode")
    return NodeHello(node=node, options=shared, **{**fields, **changes})


def test_a_node_like_its_leader_may_join_with_a_machine_and_paths_of_its_own() -> None:
    own = replace(
        OPTIONS, model="/elsewhere", base_gpu=4, num_threads=8, file_cache_dir="/mnt", tenant_weights=("a=2",)
    )
    assert difference(hello(0), hello(1)) == ""
    assert difference(hello(0), hello(1, own)) == ""


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (hello(1, version="1.1"), "its version is 1.1, and that of the leader 1.0"),
        (hello(1, model="tiny def"), "its model is tiny def, and that of the leader tiny abc"),
        (hello(1, protocol=2), "its protocol is 2"),
        (hello(1, num_nodes=4), "--nnodes 4, and the leader with 2"),
        (hello(2), "its --node-rank is 2: nodes beside the leader have 1 to 1"),
        (hello(0), "its --node-rank is 0"),
        (hello(1, replace(OPTIONS, page_size=32)), "its --page-size is 32, and that of the leader 16"),
        (hello(1, replace(OPTIONS, kv_cache_mib=8)), "its --kv-cache-mib is 8"),
        (NodeHello(node=1, protocol=1, num_nodes=2, version="1.0", model="tiny abc"), "is unknown"),
    ],
)
def test_what_differs_is_named_with_both_values(theirs: NodeHello, words: str) -> None:
    assert words in difference(hello(0), theirs)
