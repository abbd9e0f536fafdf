from __future__ import annotations

import pytest

from diptych.cli.operate.update_weights import rounds, workers_of
from diptych.common.errors import ConfigError
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance

PREFILL, DECODE, ROUTER = bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE, bootstrap_pb2.ROLE_ROUTER
UNIFIED = bootstrap_pb2.ROLE_UNIFIED


def instance(
    number: int, role: bootstrap_pb2.Role, started_as: str = "m", state: bootstrap_pb2.InstanceState | None = None
) -> Instance:
    ready = bootstrap_pb2.INSTANCE_STATE_READY
    return Instance(instance_id=number, role=role, started_as=started_as, state=ready if state is None else state)


def test_pairs_are_updated_one_after_the_other_and_then_who_has_no_partner() -> None:
    workers = [
        instance(1, PREFILL),
        instance(2, PREFILL),
        instance(3, DECODE),
        instance(4, DECODE),
        instance(5, DECODE),
    ]
    assert [[worker.instance_id for worker in together] for together in rounds(workers)] == [[1, 3], [2, 4], [5]]


def test_a_unified_worker_is_updated_alone() -> None:
    workers = [instance(1, UNIFIED), instance(2, PREFILL), instance(3, UNIFIED), instance(4, DECODE)]
    assert workers_of(workers, "") == workers
    assert [[worker.instance_id for worker in together] for together in rounds(workers)] == [[2, 4], [1], [3]]


def test_only_ready_workers_of_the_model_are_meant() -> None:
    starting = instance(3, DECODE, state=bootstrap_pb2.INSTANCE_STATE_STARTING)
    members = [instance(1, PREFILL), instance(2, DECODE), starting, instance(4, ROUTER)]
    assert workers_of(members, "") == members[:2]
    other = instance(5, PREFILL, "other")
    assert workers_of([*members, other], "other") == [other]


def test_which_model_must_be_said_when_there_are_several() -> None:
    with pytest.raises(ConfigError, match="a and b: say which"):
        workers_of([instance(1, PREFILL, "a"), instance(2, PREFILL, "b")], "")


@pytest.mark.parametrize("started_as", ["", "x"])
def test_no_worker_is_an_error_in_words(started_as: str) -> None:
    with pytest.raises(ConfigError, match="no worker is ready"):
        workers_of([], started_as)
