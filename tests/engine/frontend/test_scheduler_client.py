from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from diptych.common.members.heartbeat import new_heartbeat
from diptych.common.members.roles import Role
from diptych.engine import EngineOptions
from diptych.engine.frontend import scheduler_client
from diptych.engine.frontend.scheduler_client import SchedulerClient, SchedulerDied, start_scheduler
from diptych.engine.nodes.company import Alone
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


@pytest.mark.integration
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


@pytest.mark.integration
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


class EndedProcess:
    """It says why only once its end is known, as where its channel is read a moment later."""

    pid, returncode = 0, 1

    def __init__(self, channel: zmq.asyncio.Socket) -> None:
        self._channel = channel

    async def wait(self) -> int:
        asyncio.get_running_loop().call_later(0.01, self._say)
        return self.returncode

    def _say(self) -> None:
        words = engine_pb2.SchedulerEvents(fatal="no room").SerializeToString()
        self._said = asyncio.ensure_future(self._channel.send(words))


class LostNode(Alone):
    """A node that is noticed to be gone a moment after the rank here that lost its connection."""

    async def last_words(self, timeout_s: float) -> str:
        await asyncio.sleep(0)
        return "node 1 has ended"


@pytest.mark.parametrize(
    ("company", "words"),
    [
        (Alone, "^no room$"),
        (LostNode, "no room; a part of the group is gone: node 1 has ended"),
    ],
)
def test_the_last_words_of_a_process_are_heard_though_its_end_is_noticed_first(
    tmp_path: Path, company: type[Alone], words: str
) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        ours, theirs = (context.socket(zmq.PAIR) for _ in range(2))
        ours.bind("inproc://scheduler")
        theirs.connect("inproc://scheduler")
        process: Any = EndedProcess(theirs)
        heartbeat: Any = None
        client = SchedulerClient([process], ours, str(tmp_path), heartbeat, company())
        try:
            with pytest.raises(SchedulerDied, match=words):
                await client.ready()
        finally:
            context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


STUCK = "from diptych.common import lifecycle; lifecycle.tell_stacks(); print(flush=True); input()"


@pytest.mark.integration
def test_a_scheduler_that_does_not_stop_says_where_it_is_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scheduler_client, "_STOP_TIMEOUT_S", 0.0)

    async def test() -> int | None:
        pipe = asyncio.subprocess.PIPE
        stuck = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, stdin=pipe, stdout=pipe, stderr=pipe)
        assert stuck.stdout
        await stuck.stdout.readline()  # it is ready

        class Client(SchedulerClient):
            async def _all_end(self, timeout_s: float) -> bool:
                if timeout_s:
                    assert stuck.stderr
                    await stuck.stderr.readuntil(b"in <module>")
                return False

        with new_heartbeat() as (heartbeat, _):
            client = Client((stuck,), zmq.asyncio.Context.instance().socket(zmq.PAIR), str(tmp_path), heartbeat)
        client._is_ready = True
        await client.stop()
        return stuck.returncode

    assert asyncio.run(asyncio.wait_for(test(), TIMEOUT_S)) == -signal.SIGKILL
