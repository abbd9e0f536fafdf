"""What a group sends to its scheduler, and what becomes of its legs when it can't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.common.members.roles import LegKind, Role
from diptych.embedded import group as group_module
from diptych.embedded.group import Group
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.router.workers.legs import Work
from diptych.v1 import admin_pb2, engine_pb2
from diptych.v1.worker_pb2 import StartLeg

HUNG_S = 60.0  # that nothing takes on however busy a machine


class Scheduler:
    """Notes what it is sent. It says nothing."""

    def __init__(self, error: Exception | None = None, said: Exception | None = None) -> None:
        """`error`: of what it is sent, `said`: of what it says."""
        self.sent: asyncio.Queue[engine_pb2.SchedulerCommands] = asyncio.Queue()
        self.ends: list[str] = []
        self._error = error
        self._said = said

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        if self._error is not None:
            raise self._error
        self.sent.put_nowait(commands)

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        await (self.sent.get() if self._said else asyncio.Event().wait())
        yield engine_pb2.SchedulerEvents()
        raise self._said or AssertionError("it says nothing")

    async def end_companions(self) -> None:
        self.ends.append("companions")

    async def stop(self) -> None:
        self.ends.append("its own")


class Receiver:
    def __init__(self) -> None:
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    def lose(self, kind: LegKind, reason: str) -> None:
        self.lost.put_nowait(reason)


def start(group: Group, room: int, prompt: bytes, receiver: Any) -> None:
    leg = StartLeg(prompt_tokens=prompt).SerializeToString()
    group.start(LegKind.LOCAL, StartLeg(room=room), leg, Work(1), receiver)


def run(check: Any, scheduler: Any) -> None:
    async def body() -> None:
        group = Group(scheduler, 1, Role.LOCAL, 16)
        running = asyncio.create_task(group.run())
        async with asyncio.timeout(HUNG_S):
            await check(group)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(body())


def test_long_legs_go_in_messages_of_their_own_and_no_abort_overtakes_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "MAX_BATCH_BYTES", 100)

    async def check(group: Group) -> None:
        for room, num_bytes in enumerate((8, 8, 200, 8, 60, 60), 1):
            start(group, room, bytes(num_bytes), Receiver())
        group.abort(6)
        sent = [await scheduler.sent.get() for _ in range(4)]
        assert [[leg.room for leg in each.start] for each in sent] == [[1, 2], [3], [4, 5], [6]]
        assert [list(each.abort) for each in sent] == [[], [], [], [6]]
        start(group, 7, b"", Receiver())
        assert [leg.room for leg in (await scheduler.sent.get()).start] == [7]

    run(check, scheduler := Scheduler())


def test_a_group_that_can_not_tell_its_scheduler_what_to_do_loses_its_legs_and_takes_no_others() -> None:
    async def check(group: Group) -> None:
        start(group, 1, bytes(8), receiver := Receiver())
        assert "can't be told what to do: ValueError('too long')" in await receiver.lost.get()
        assert group.death is not None
        with pytest.raises(SchedulerDied, match="can't be told"):
            await group.queries.administer(admin_pb2.AdminCommand())

    run(check, Scheduler(ValueError("too long")))


def test_a_group_that_can_not_read_what_its_scheduler_says_loses_its_legs_and_takes_no_others() -> None:
    async def check(group: Group) -> None:
        start(group, 1, bytes(8), receiver := Receiver())
        assert "can't be understood: ValueError('no message')" in await receiver.lost.get()
        assert group.death is not None
        with pytest.raises(SchedulerDied, match="can't be understood"):
            await group.queries.administer(admin_pb2.AdminCommand())

    run(check, Scheduler(said=ValueError("no message")))


def test_a_scheduler_that_can_not_be_told_what_to_do_is_ended_with_those_that_share_its_experts() -> None:
    """It would go on with legs that nobody waits for."""
    scheduler: Any = Scheduler(ValueError("too long"))

    async def body() -> None:
        group = Group(scheduler, 1, Role.LOCAL, 16)
        start(group, 1, bytes(8), Receiver())
        async with asyncio.timeout(HUNG_S):
            await group_module._run(group)

    asyncio.run(body())
    assert scheduler.ends == ["companions", "its own"]


def test_a_group_that_is_cancelled_ends_nobody() -> None:
    """Whoever closes the engine does."""
    scheduler: Any = Scheduler()

    async def body() -> None:
        group = Group(scheduler, 1, Role.LOCAL, 16)
        start(group, 1, bytes(8), receiver := Receiver())
        running = asyncio.create_task(group_module._run(group))
        await scheduler.sent.get()
        running.cancel()
        assert await receiver.lost.get() == "the engine was closed"
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()

    asyncio.run(body())
    assert scheduler.ends == []
