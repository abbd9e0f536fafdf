from __future__ import annotations

import pytest

from diptych.cli.operate.role import find
from diptych.common.errors import ConfigError
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance

PREFILL = Instance(instance_id=0xAB1 << 52, role=bootstrap_pb2.ROLE_PREFILL, address="h:1")
RANK = Instance(instance_id=0xAB2 << 52, role=bootstrap_pb2.ROLE_PREFILL, address="h:1", dp_rank=1)
DECODE = Instance(instance_id=0xC << 60, role=bootstrap_pb2.ROLE_DECODE, address="h:2")
ROUTER = Instance(instance_id=0xD << 60, role=bootstrap_pb2.ROLE_ROUTER, address="h:3")
EVERYBODY = [PREFILL, RANK, DECODE, ROUTER]


@pytest.mark.parametrize(
    ("wanted", "worker"),
    [
        ("h:2", DECODE),
        ("c000000000000000", DECODE),
        ("c", DECODE),
        ("AB1", PREFILL),
        ("h:1#0", PREFILL),
        ("h:1#1", RANK),
    ],
)
def test_a_worker_is_called_by_its_id_or_its_address(wanted: str, worker: Instance) -> None:
    assert find(EVERYBODY, wanted) == worker


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("ab", "several workers are called 'ab'; there are:\n  prefill ab10"),
        ("h:1", "several workers are called 'h:1'"),
        ("h:3", "no worker is called 'h:3'; there are:\n  decode c000"),
        ("x", "no worker is called 'x'"),
    ],
)
def test_a_name_that_is_not_exactly_ones_is_an_error_with_the_choice(wanted: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find(EVERYBODY, wanted)


def test_without_workers_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match="there are:\n  none"):
        find([ROUTER], "x")
