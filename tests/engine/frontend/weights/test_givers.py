"""Who is named to a starting scheduler as giver of weights, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from diptych.bootstrap.announcement import read_heartbeat
from diptych.common.trust.instance_secret import InstanceSecret
from diptych.engine.frontend.sessions import hide_link_key
from diptych.engine.frontend.weights import givers
from diptych.engine.frontend.weights.givers import MOST, name_givers
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance, Terms, TransferInfo, WeightsDoor
from diptych.v1.engine_pb2 import SchedulerCommands

OURS = InstanceSecret.new()
READY = bootstrap_pb2.INSTANCE_STATE_READY


class Fake:
    """Membership, and a scheduler that starts."""

    def __init__(self, *instances: Instance) -> None:
        self.listed = {each.instance_id: each for each in instances}
        self.told: list[SchedulerCommands] = []
        self._listeners: list[Callable[[], None]] = []

    def instances(self) -> dict[int, Instance]:
        return self.listed

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def list(self, *instances: Instance) -> None:
        self.listed |= {each.instance_id: each for each in instances}
        for listener in self._listeners:
            listener()

    async def send_first(self, commands: SchedulerCommands) -> None:
        self.told.append(commands)

    @property
    def named(self) -> set[tuple[str, int, bytes]]:
        (commands,) = self.told
        return {(each.host, each.door.port, each.door.key) for each in commands.weight_givers.givers}


def worker(
    number: int, *, weights: str = "w", state: bootstrap_pb2.InstanceState = READY, key: bytes = b"key", port: int = 7
) -> Instance:
    door = TransferInfo(weights_door=WeightsDoor(port=port, key=key)) if key else None
    terms = Terms(weights=weights)
    return Instance(instance_id=number, address=f"10.0.0.{number}:1", terms=terms, state=state, transfer=door)


def us() -> Instance:
    return Instance(instance_id=OURS.instance_id, address="10.0.0.9:1")


def play(fake: Fake, *later: tuple[Instance, ...]) -> Fake:
    async def run() -> None:
        naming = asyncio.ensure_future(name_givers(fake, fake, OURS, "w"))
        for instances in later:
            await asyncio.sleep(0)
            assert not fake.told
            fake.list(*instances)
        async with asyncio.timeout(60):
            await naming

    asyncio.run(run())
    return fake


def test_who_serves_the_same_weights_and_opens_a_door_is_named() -> None:
    leaving = bootstrap_pb2.INSTANCE_STATE_DRAINING
    others = worker(1), worker(2, weights="others"), worker(3, state=leaving), worker(4)
    assert play(Fake(us(), *others)).named == {("10.0.0.1", 7, b"key"), ("10.0.0.4", 7, b"key")}


def test_nobody_is_named_before_membership_knows_us_and_keys_are_told() -> None:
    fake = play(Fake(), (worker(1, key=b""),), (us(),), (worker(1),))
    assert fake.named == {("10.0.0.1", 7, b"key")}


def test_few_of_many_are_named() -> None:
    assert len(play(Fake(us(), *map(worker, range(1, 9)))).named) == MOST


def test_a_scheduler_hears_that_there_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(givers, "LISTED_S", 0.01)
    monkeypatch.setattr(givers, "TOLD_S", 0.01)
    assert play(Fake(us())).named == set()
    assert play(Fake()).named == set(), "membership is away"
    assert play(Fake(us(), worker(1, key=b""))).named == set(), "it gives none"


def test_only_members_that_are_told_keys_hear_of_a_door() -> None:
    """Neither routers, of sessions and status, nor who is told no keys by bootstrap."""
    record = worker(1)
    heartbeat = bootstrap_pb2.Heartbeat(sequence=1, instance=record)
    heartbeat.instance.role = bootstrap_pb2.ROLE_UNIFIED
    said = read_heartbeat(heartbeat.SerializeToString()).payload
    assert Instance.FromString(said.whole).transfer.weights_door.key == b"key"
    assert not Instance.FromString(said.without_key).transfer.HasField("weights_door")
    hide_link_key(record)
    assert not record.transfer.HasField("weights_door")
