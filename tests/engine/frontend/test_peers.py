from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.members.terms import Feature, Terms, bits, terms_of, terms_to_wire
from diptych.engine.frontend import peers
from diptych.engine.frontend.peers import MAX_ALIKE, Peers
from diptych.v1 import bootstrap_pb2
from diptych.v1.engine_pb2 import SchedulerCommands

TIMEOUT_S = 200.0  # only for what hangs: machines may be busy

TERMS = Terms(weights="w", oldest_protocol=1, newest_protocol=1)
READY = bootstrap_pb2.INSTANCE_STATE_READY
P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED


def instance(instance_id: int, role: Role, **fields: Any) -> bootstrap_pb2.Instance:
    made = bootstrap_pb2.Instance(
        instance_id=instance_id,
        role=role.wire,
        state=READY,
        compat="c",
        terms=terms_to_wire(TERMS),
        transfer=bootstrap_pb2.TransferInfo(engine_metadata=b"how to link"),
    )
    made.MergeFrom(bootstrap_pb2.Instance(**fields))
    return made


class World:
    """A membership, and a scheduler that notes what it is told."""

    def __init__(self, ours: bootstrap_pb2.Instance, num_move_links: int = 0) -> None:
        self.ours = ours
        self.members: dict[int, bootstrap_pb2.Instance] = {}
        self.told: asyncio.Queue[list[tuple[int, str]]] = asyncio.Queue()
        self.peers = Peers(ours, self, lambda: None, num_move_links)
        self._listeners: list[Callable[[], None]] = []

    def instances(self) -> dict[int, bootstrap_pb2.Instance]:
        return self.members

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def send(self, commands: SchedulerCommands) -> None:
        names = [(each.instance_id, bootstrap_pb2.Role.Name(each.role)) for each in commands.peers.instances]
        self.told.put_nowait(names)

    def publish(self, *members: bootstrap_pb2.Instance) -> None:
        self.members = {member.instance_id: member for member in members}
        for listener in self._listeners:
            listener()

    async def next_told(self) -> list[tuple[int, str]]:
        return await asyncio.wait_for(self.told.get(), TIMEOUT_S)


def following(
    ours: bootstrap_pb2.Instance, play: Callable[[World], Coroutine[Any, Any, None]], num_move_links: int = 0
) -> None:
    async def run() -> None:
        world = World(ours, num_move_links)
        follower = asyncio.ensure_future(world.peers.follow(world))
        await asyncio.sleep(0)
        try:
            await play(world)
        finally:
            follower.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("role", "peers"),
    [
        (P, {"ROLE_DECODE", "ROLE_UNIFIED"}),
        (D, {"ROLE_PREFILL", "ROLE_UNIFIED"}),
        (U, {"ROLE_PREFILL", "ROLE_DECODE", "ROLE_UNIFIED"}),
    ],
)
def test_peers_are_those_that_kv_moves_to_or_from(role: Role, peers: set[str]) -> None:
    async def play(world: World) -> None:
        router = bootstrap_pb2.Instance(instance_id=9, role=bootstrap_pb2.ROLE_ROUTER, compat="c", state=READY)
        others = [instance(number, each) for number, each in enumerate(WORKER_ROLES.values(), 2)]
        world.publish(world.ours, router, *others)
        assert {name for _, name in await world.next_told()} == peers
        assert world.peers.num_known == len(peers)
        assert world.peers.num_among([1, 2, 3, 4, 9, 77]) == len(peers)

    following(instance(1, role), play)


@pytest.mark.parametrize(
    "unfit",
    [
        instance(2, D, state=bootstrap_pb2.INSTANCE_STATE_GONE),
        bootstrap_pb2.Instance(instance_id=2, role=D.wire, state=bootstrap_pb2.INSTANCE_STATE_STARTING),
        instance(2, D, terms=terms_to_wire(Terms(weights="x"))),
    ],
    ids=["gone", "loading", "other weights"],
)
def test_who_can_not_exchange_kv_is_no_peer(unfit: bootstrap_pb2.Instance) -> None:
    async def play(world: World) -> None:
        world.publish(world.ours, unfit, instance(3, D))
        assert await world.next_told() == [(3, "ROLE_DECODE")]
        assert world.peers.num_known == 1

    following(instance(1, P), play)


def test_a_link_stays_when_weights_change_but_nothing_new_begins() -> None:
    async def play(world: World) -> None:
        world.publish(world.ours, instance(2, D), instance(3, D))
        assert await world.next_told() == [(2, "ROLE_DECODE"), (3, "ROLE_DECODE")]
        others = terms_to_wire(Terms(weights="x"))
        world.publish(world.ours, instance(2, D, terms=others), instance(3, D), instance(4, U))
        assert await world.next_told() == [(2, "ROLE_DECODE"), (3, "ROLE_DECODE"), (4, "ROLE_UNIFIED")]
        assert (world.peers.num_known, world.peers.num_among([2, 3])) == (2, 1)

    following(instance(1, P), play)


def test_peers_follow_the_roles_of_both() -> None:
    async def play(world: World) -> None:
        world.publish(world.ours, instance(2, D), instance(3, P))
        assert await world.next_told() == [(2, "ROLE_DECODE")]
        world.ours.role = D.wire
        world.peers.look_again()
        assert await world.next_told() == [(3, "ROLE_PREFILL")]
        assert (world.peers.num_known, world.peers.num_among([2])) == (1, 0)
        world.publish(world.ours, instance(2, U), instance(3, P))
        assert await world.next_told() == [(2, "ROLE_UNIFIED"), (3, "ROLE_PREFILL")]
        world.publish(world.ours, instance(3, P))
        assert await world.next_told() == [(3, "ROLE_PREFILL")]

    following(instance(1, P), play)


def test_workers_that_only_decode_link_to_their_neighbours_among_each_other() -> None:
    async def play(world: World) -> None:
        others = [instance(number, D) for number in (10, 20, 40, 50)]
        unfit = [instance(29, D, terms=terms_to_wire(Terms(weights="x"))), bootstrap_pb2.Instance(instance_id=31)]
        world.publish(world.ours, instance(2, P), *others, *unfit)
        assert [key for key, _ in await world.next_told()] == [2, 20, 40]
        assert (world.peers.num_known, world.peers.num_among([2, 20, 40])) == (1, 1), "none that prompts come from"
        world.publish(world.ours, instance(2, P), *others[:2], others[3])
        assert [key for key, _ in await world.next_told()] == [2, 20, 50]

    following(instance(30, D), play, num_move_links=2)


def test_a_link_that_has_been_up_stays_whoever_comes_between() -> None:
    async def play(world: World) -> None:
        world.publish(world.ours, instance(10, D), instance(60, D))
        assert [key for key, _ in await world.next_told()] == [10, 60]
        world.peers.linked([10])
        others = [instance(number, D) for number in (10, 20, 50, 60)]
        world.publish(world.ours, *others)
        assert [key for key, _ in await world.next_told()] == [10, 20, 50]
        world.publish(world.ours, *others[1:])
        assert [key for key, _ in await world.next_told()] == [20, 50]
        world.publish(world.ours, instance(10, P), *others[1:])
        assert [key for key, _ in await world.next_told()] == [10, 20, 50], "for prompts"

    following(instance(30, D), play, num_move_links=2)


def test_what_does_not_concern_links_is_no_news() -> None:
    async def play(world: World) -> None:
        world.publish(instance(2, D))
        await world.next_told()
        world.publish(instance(2, D, paused=True))
        world.publish(instance(2, D), instance(3, P))
        await asyncio.sleep(0)
        world.publish(instance(4, D))
        assert await world.next_told() == [(4, "ROLE_DECODE")]

    following(instance(1, P), play)


def test_who_bootstrap_does_not_tell_how_to_link_to_is_linked_once_it_does() -> None:
    hidden = instance(2, D)
    hidden.ClearField("transfer")

    async def play(world: World) -> None:
        world.publish(world.ours, hidden, instance(3, D))
        assert await world.next_told() == [(3, "ROLE_DECODE")]
        world.publish(world.ours, instance(2, D), instance(3, D))
        assert await world.next_told() == [(2, "ROLE_DECODE"), (3, "ROLE_DECODE")]

    following(instance(1, P), play)


def pulling(instance_id: int, role: Role = P, weights: str = "w") -> bootstrap_pb2.Instance:
    terms = replace(TERMS, weights=weights, features=bits(Feature.PULL))
    return instance(instance_id, role, terms=terms_to_wire(terms))


def fleet_of(size: int) -> list[bootstrap_pb2.Instance]:
    rng = random.Random(1)
    return [pulling(rng.getrandbits(63)) for _ in range(size)]


def test_workers_that_compute_prompts_are_linked_if_both_pull_prefixes_and_that_is_no_reason_to_be_ready() -> None:
    async def play(world: World) -> None:
        world.publish(pulling(2), instance(3, P), pulling(4, D), instance(5, D))
        assert {number for number, _ in await world.next_told()} == {2, 4, 5}
        assert world.peers.num_known == 2
        assert world.peers.num_among([2, 4]) == 1

    following(pulling(1), play)


def test_in_a_large_fleet_each_is_linked_to_some_that_are_alike_the_same_as_from_the_other_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, linked, num_read = fleet_of(200), set[tuple[int, int]](), 0

    def read(wire: bootstrap_pb2.Terms) -> Terms:
        nonlocal num_read
        num_read += 1
        return terms_of(wire)

    async def play(world: World) -> None:
        world.publish(*fleet)
        ids = [key for key, _ in await world.next_told()]
        assert len(ids) < 2 * MAX_ALIKE
        linked.update((world.ours.instance_id, other) for other in ids)

    monkeypatch.setattr(peers, "terms_of", read)
    for ours in fleet:
        following(ours, play)
    assert linked == {(other, one) for one, other in linked}
    assert len(linked) > len(fleet) * MAX_ALIKE / 2
    assert num_read < 10 * len(fleet) ** 2, "a change costs each worker a look at each member"


def test_a_link_for_prefixes_that_has_been_up_stays_while_the_fleet_grows_and_goes_with_its_member() -> None:
    fleet = fleet_of(80)
    ours, few = fleet[0], [each.instance_id for each in fleet[1:16]]

    async def play(world: World) -> None:
        world.publish(*fleet[:16])
        assert [key for key, _ in await world.next_told()] == few, "all of so few"
        world.peers.linked(few[:7])
        world.publish(*fleet)
        told = {key for key, _ in await world.next_told()}
        assert told >= set(few[:7])
        assert not told >= set(few), "one that has not been up is the other end's wish alone, or nobody's"
        world.publish(ours, *fleet[2:])
        assert few[0] not in {key for key, _ in await world.next_told()}

    following(ours, play)


def test_workers_of_other_weights_take_no_link_for_prefixes_from_those_of_ours() -> None:
    alike, others = fleet_of(3), [pulling(1000 + number, weights="x") for number in range(60)]

    async def play(world: World) -> None:
        world.publish(*others, *alike)
        assert [key for key, _ in await world.next_told()] == [each.instance_id for each in alike[1:]]

    following(alike[0], play)
