"""A scheduler group that holds nothing for a while, or for good."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diptych.common.errors import Unavailable
from diptych.common.members.roles import Role
from diptych.engine.frontend.departure import Departure, LastWork
from diptych.engine.frontend.sessions import Sessions
from diptych.v1 import bootstrap_pb2, worker_pb2
from diptych.v1.engine_pb2 import SchedulerCommands

READY, DRAINING = bootstrap_pb2.INSTANCE_STATE_READY, bootstrap_pb2.INSTANCE_STATE_DRAINING
LONG_S = 60.0


class Rooms:
    """Implements `Work`: one room that ends when told, or when handed back if `can_move`."""

    def __init__(self, can_move: bool) -> None:
        self.done = asyncio.Event()
        self.oldest_s = 2.0
        self._can_move = can_move

    @property
    def num_left(self) -> int:
        return 0 if self.done.is_set() else 1

    async def wait_until_none(self) -> None:
        await self.done.wait()

    async def hand_back(self) -> None:
        if self._can_move:
            self.done.set()


class Group:
    """A record, its sessions, and what was told of it."""

    def __init__(self, *, can_move: bool = True, release_s: float = LONG_S) -> None:
        self.rooms = Rooms(can_move)
        self.sessions = Sessions(Role.DECODE)
        self.record = bootstrap_pb2.Instance(state=READY)
        self.told: list[tuple[int, bool]] = []  # state, paused
        self.commands: list[SchedulerCommands] = []
        last_work = LastWork(self.rooms, self, 3.0)
        self.departure = Departure(self.rooms, last_work, self.sessions, self.record, self._announce, release_s)

    async def send(self, commands: SchedulerCommands) -> None:
        self.commands.append(commands)

    def _announce(self) -> None:
        self.told.append((self.record.state, self.record.paused))


def play(scene: Callable[[Group], Awaitable[None]], **options: bool | float) -> Group:
    async def run() -> Group:
        group = Group(**options)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await scene(group)
        return group

    return asyncio.run(run())


def test_a_group_is_vacated_with_a_way_back() -> None:
    async def scene(group: Group) -> None:
        vacating = asyncio.ensure_future(group.departure.vacate("a new role", LONG_S))
        await asyncio.sleep(0)
        assert group.sessions.closed_because == "a new role"
        group.rooms.done.set()
        await vacating
        assert group.departure.progress() is None
        group.departure.resume()

    group = play(scene)
    assert (group.sessions.closed_because, group.told) == ("", [(READY, True), (READY, False)])


def test_what_does_not_finish_in_time_is_handed_back() -> None:
    play(lambda group: group.departure.vacate("new weights", 0.0))


def test_what_does_not_let_go_is_an_error_in_the_end() -> None:
    with pytest.raises(Unavailable, match="still hold KV"):
        play(lambda group: group.departure.vacate("new weights", 0.0), can_move=False, release_s=0.01)


def test_a_drain_tells_how_far_it_is_and_has_no_way_back() -> None:
    async def scene(group: Group) -> None:
        running = asyncio.ensure_future(group.departure.draining.run())
        group.departure.draining.ask(LONG_S)
        assert (progress := group.departure.progress()) is not None
        assert (progress.phase, progress.requests_left, progress.oldest_s) == (worker_pb2.Drain.PHASE_DRAINING, 1, 2.0)
        with pytest.raises(Unavailable, match="draining"):
            await group.departure.vacate("a new role", 0.0)
        group.departure.draining.hurry()
        await running
        assert (progress := group.departure.progress()) is not None
        assert progress.phase == worker_pb2.Drain.PHASE_EMPTY

    group = play(scene)
    assert (group.sessions.closed_because, group.told) == ("it is draining", [(DRAINING, False)])


def test_a_drain_that_comes_while_it_is_vacated_stays() -> None:
    async def scene(group: Group) -> None:
        vacating = asyncio.ensure_future(group.departure.vacate("new weights", LONG_S))
        await asyncio.sleep(0)
        group.departure.draining.ask(LONG_S)
        group.rooms.done.set()
        await vacating
        group.departure.resume()

    group = play(scene)
    assert (group.sessions.closed_because, group.told[-1]) == ("it is draining", (DRAINING, False))


def test_who_leaves_lets_peers_have_what_is_cached_until_time_is_up() -> None:
    async def scene(group: Group) -> None:
        running = asyncio.ensure_future(group.departure.draining.run())
        group.departure.draining.ask(LONG_S)
        await asyncio.sleep(0)
        group.departure.draining.ask(LONG_S / 2)
        group.departure.draining.hurry()
        await running

    group = play(scene)
    assert [command.give_cache.within_s for command in group.commands] == [3.0, 0.0]


def test_who_only_changes_keeps_what_is_cached() -> None:
    assert play(lambda group: group.departure.vacate("a new role", 0.0)).commands == []
