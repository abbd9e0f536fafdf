"""The drain of a worker with several scheduler groups, whose schedulers say nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from diptych.common.event_loop import Stop
from diptych.common.members.roles import Role
from diptych.common.verdicts.drain import Phase
from diptych.engine.frontend.admin import WorkerDrain
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.service import WorkerService
from diptych.engine.frontend.sessions import Sessions
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.v1 import bootstrap_pb2, engine_pb2

PROMPTS = TokenizerManager(lambda: pytest.fail("there is no text"), num_threads=1, cache_bytes=0)


class SilentScheduler:
    """Hears everything and answers nothing."""

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None: ...


def new_group(instance_id: int) -> WorkerGroup:
    record = bootstrap_pb2.Instance(instance_id=instance_id)
    return WorkerGroup(cast(Any, SilentScheduler()), record, Sessions(Role.DECODE), lambda: None, PROMPTS, 60.0, 60.0)


async def leave(group: WorkerGroup) -> None:
    """As a group does that can't let go of its rooms, when the process is told to stop."""
    draining, stop = group.departure.draining, Stop()
    running = asyncio.ensure_future(draining.run())
    stop.set()
    await draining.leave_on(stop, 0.0, release_s=0.01)
    running.cancel()


def test_a_group_that_has_left_does_not_keep_the_others_from_being_drained() -> None:
    async def scene() -> None:
        groups = [new_group(1), new_group(2)]
        service = WorkerService(groups)
        drain = WorkerDrain(service.groups, drain_s=60.0)
        await leave(groups[0])
        service.leave(groups[0])
        drain.ask(0.0)
        assert {name: each.phase for name, each in drain.progress().items()} == {"0" * 15 + "2": Phase.DRAINING}

    asyncio.run(asyncio.wait_for(scene(), 200.0))


def test_the_last_group_is_served_until_the_worker_ends_and_none_is_forgotten_twice() -> None:
    async def scene() -> None:
        groups = [new_group(1), new_group(2)]
        service = WorkerService(groups)
        for group in groups:
            service.leave(group)
        assert service.groups() == [groups[1]]
        assert service.forget(groups[0]) == 1  # it dies after it has left
        assert service.forget(groups[1]) == 0

    asyncio.run(scene())


def test_each_field_of_what_a_scheduler_says_has_who_hears_of_it() -> None:
    """Its client hears that it is ready, where its ranks are, or that it is about to exit."""

    async def scene() -> None:
        said = set(engine_pb2.SchedulerEvents.DESCRIPTOR.fields_by_name) - {"ready", "rank_doors", "fatal"}
        assert set(new_group(1)._handlers) == said

    asyncio.run(scene())
