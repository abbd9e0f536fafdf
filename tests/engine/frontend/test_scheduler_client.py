from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from diptych.common.members.roles import Role
from diptych.engine import EngineOptions
from diptych.engine.frontend.scheduler_client import SchedulerClient, start_scheduler
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.values.transfer_rules import TransferRules
from diptych.v1 import engine_pb2

TIMEOUT_S = 60.0


async def start(model: Path) -> SchedulerClient:
    options = EngineOptions(model=str(model), kv_cache_mib=4)
    config = SchedulerConfig("engine", "auto", "warning", 1, "auto", TransferRules(), options, Role.LOCAL.value)
    return await start_scheduler(config)


async def next_answer(client: SchedulerClient) -> list[int]:
    async for events in client.events():
        if events.status_answers:
            return list(events.status_answers)
    return []


def test_signals_to_the_whole_process_group_leave_it_to_the_frontend_when_to_stop(tiny_folder: Path) -> None:
    async def test() -> list[int]:
        client = await start(tiny_folder)
        try:
            await client.ready()
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pids[0], number)
            await client.send(engine_pb2.SchedulerCommands(status_query=7))
            return await next_answer(client)
        finally:
            await client.stop()

    assert asyncio.run(asyncio.wait_for(test(), TIMEOUT_S)) == [7]


def test_what_is_said_before_the_process_has_even_connected_is_heard(tiny_folder: Path) -> None:
    async def test() -> list[int]:
        client = await start(tiny_folder)
        try:
            await client.send(engine_pb2.SchedulerCommands(status_query=7))
            await client.ready()
            return await next_answer(client)
        finally:
            await client.stop()

    assert asyncio.run(asyncio.wait_for(test(), TIMEOUT_S)) == [7]
