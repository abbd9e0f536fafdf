from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import zmq.asyncio

from diptych.common.members.heartbeat import new_heartbeat
from diptych.common.members.roles import Role
from diptych.engine import EngineOptions
from diptych.engine.frontend import scheduler_client
from diptych.engine.frontend.scheduler_client import SchedulerClient, SchedulerDied, share_experts, start_scheduler
from diptych.engine.nodes.company import Alone
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.tensor_parallel.last_words import LOST
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


class LivingProcess:
    """It does not stop when it is asked to: it is killed."""

    pid = 0

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._has_ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self._has_ended.wait()
        return self.returncode

    def send_signal(self, _: int) -> None:
        self.kill()

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL
        self._has_ended.set()


@contextmanager
def living(folder: Path) -> Iterator[tuple[SchedulerClient, LivingProcess, zmq.asyncio.Socket]]:
    """Yield a client, its process, and the process's end of the channel. Nobody is asked to end: it is killed."""
    context = zmq.asyncio.Context()
    ours, theirs = (context.socket(zmq.PAIR) for _ in range(2))
    ours.bind("inproc://scheduler")
    theirs.connect("inproc://scheduler")
    process, heartbeat = LivingProcess(), cast(Any, None)
    try:
        yield SchedulerClient(cast(Any, [process]), ours, str(folder), heartbeat), process, theirs
    finally:
        context.destroy(linger=0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


KILLED = "the scheduler process ended with code -9"


@pytest.mark.parametrize(
    ("sharing", "words"),
    [
        (True, f"of a scheduler that shares its experts, the scheduler process ended with code -9; {LOST}"),
        (False, LOST),
    ],
    ids=["of those that step with it", "elsewhere"],
)
def test_who_lost_its_company_says_whose_end_it_was(tmp_path: Path, sharing: bool, words: str) -> None:
    """The other one is noticed to have ended a moment after that."""

    async def test() -> None:
        with living(tmp_path) as (client, _, theirs), living(tmp_path) as (other, victim, _):
            if sharing:
                share_experts([client, other])
            await theirs.send(engine_pb2.SchedulerEvents(fatal=LOST).SerializeToString())
            asyncio.get_running_loop().call_later(0.01, victim.kill)
            with pytest.raises(SchedulerDied, match=f"^{words}$"):
                await client.ready()
            victim.kill()

    run(test())


def test_what_is_sent_to_a_scheduler_that_was_stopped_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's session may end behind its scheduler: it has rooms aborted."""
    monkeypatch.setattr(scheduler_client, "_STOP_TIMEOUT_S", 0.0)

    async def test() -> None:
        with living(tmp_path) as (client, _, theirs):
            await theirs.send(engine_pb2.SchedulerEvents(ready=engine_pb2.SchedulerReady()).SerializeToString())
            await client.ready()
            await client.stop()
            await client.send(engine_pb2.SchedulerCommands(abort=[7]))
            await client.stop()

    run(test())


def test_who_listens_to_a_scheduler_hears_no_more_once_it_was_stopped(tmp_path: Path) -> None:
    async def test() -> None:
        with living(tmp_path) as (client, _, theirs):
            await theirs.send(engine_pb2.SchedulerEvents(status_answers=[7]).SerializeToString())
            heard, has_heard = list[int](), asyncio.Event()

            async def listen() -> None:
                async for events in client.events():
                    heard.extend(events.status_answers)
                    has_heard.set()

            listening = asyncio.ensure_future(listen())
            await asyncio.wait_for(has_heard.wait(), TIMEOUT_S)
            process = client._processes[0]
            client._processes = ()  # that it ends is not what ends this
            await client.stop()
            await listening
            await listen()
            assert heard == [7]
            process.kill()

    run(test())


def test_what_comes_while_nobody_listens_is_heard_by_who_listens_next(tmp_path: Path) -> None:
    async def test() -> None:
        with living(tmp_path) as (client, _, theirs):
            listening = asyncio.ensure_future(next_answer(client))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            listening.cancel()
            await asyncio.wait([listening])
            await theirs.send(engine_pb2.SchedulerEvents(status_answers=[7]).SerializeToString())
            assert await next_answer(client) == [7]

    run(test())


def test_the_last_words_of_a_process_are_waited_for_before_its_channel_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        with living(tmp_path) as (client, process, theirs):
            listening = asyncio.ensure_future(next_answer(client))
            await asyncio.sleep(0)
            process.kill()
            for _ in range(5):
                await asyncio.sleep(0)
            assert client._last_reading.locked()
            stopping = asyncio.ensure_future(client.stop())
            await asyncio.sleep(0)
            await theirs.send(engine_pb2.SchedulerEvents(fatal="no room").SerializeToString())
            with pytest.raises(SchedulerDied, match=r"^no room$"):
                await listening
            await stopping

    run(test())


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
