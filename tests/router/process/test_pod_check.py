"""What Kubernetes says of pods, beside what bootstrap says of members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from diptych.common.errors import Unavailable
from diptych.common.members.pods import Pod
from diptych.router.process.pod_check import PodCheck
from diptych.v1.bootstrap_pb2 import Instance

A, B = Instance(instance_id=1, pod="a"), Instance(instance_id=2, pod="b")


class Members:
    """Two workers; `away` while no replica vouches for them."""

    def __init__(self) -> None:
        self.away = False
        self.listed = {1: A, 2: B}

    def instances(self) -> Mapping[int, Instance]:
        return self.listed

    def retained(self) -> Mapping[int, Instance]:
        return self.instances() if self.away else {}

    def has_ended(self, instance_id: int) -> bool:
        return False

    def add_listener(self, listener: Callable[[], None]) -> None:
        pass


class Cluster:
    """Names the pods that there are; None while the API is away."""

    def __init__(self) -> None:
        self.names: list[str] | None = ["a", "b", "stranger"]

    def pods(self) -> dict[str, Pod]:
        if self.names is None:
            raise Unavailable("no API")
        return {name: Pod(name, "10.0.0.1", True) for name in self.names}


def test_a_worker_goes_with_its_pod_while_no_replica_vouches_for_it() -> None:
    members, cluster = Members(), Cluster()
    check = PodCheck(members, cluster.pods)
    told: list[set[int]] = []
    check.add_listener(lambda: told.append(set(check.instances())))
    asyncio.run(check.look())
    cluster.names = ["a"]
    asyncio.run(check.look())  # bootstrap's word holds
    members.away = True
    asyncio.run(check.look())
    cluster.names = None
    asyncio.run(check.look())  # the API is away: nothing changes, and nobody is told
    assert told == [{1, 2}, {1, 2}, {1}]
    assert set(check.instances()) == {1}
    members.away = False
    assert set(check.instances()) == {1, 2}


def test_a_pod_is_remembered_while_it_is_there_or_a_member_is_of_it() -> None:
    members, cluster = Members(), Cluster()
    check = PodCheck(members, cluster.pods)
    asyncio.run(check.look())
    cluster.names = []
    asyncio.run(check.look())
    members.listed[3] = Instance(instance_id=3, pod="stranger")  # was forgotten: nothing is known of its pod
    members.away = True
    assert set(check.instances()) == {3}
