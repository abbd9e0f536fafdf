"""A leader and its nodes over real connections: who is let in, and how each end hears of the end of the other."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.common.errors import ConfigError, DiptychError, Unavailable
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.engine.nodes import following, roster
from diptych.engine.nodes.company import GroupEnded
from diptych.engine.nodes.following import GroupLink, joined
from diptych.engine.nodes.leading import GroupLeader
from diptych.engine.nodes.roster import PlaceTaken, Roster
from diptych.v1 import rank_pb2_grpc
from diptych.v1.bootstrap_pb2 import GroupNode
from diptych.v1.rank_pb2 import NodeHello, NodeSays, RankDoors

TIMEOUT_S = 60.0  # only for what hangs
OURS = Trust(Tokens.of_variable("worker:the-token-of-this-platform"), None)
THEIRS = Trust(Tokens.of_variable("worker:the-token-of-another-one"), None)
ROUTERS = Trust(Tokens.of_variable("router:the-token-of-its-routers"), None)
BOTH = Trust(Tokens.of_variable("worker:the-token-of-this-platform\nrouter:the-token-of-its-routers"), None)
DOORS = RankDoors(key=b"k" * 40, ports={"1": 5})


def hello(node: int = 1, **fields: Any) -> NodeHello:
    return NodeHello(**{"node": node, "num_nodes": 2, "epoch": 7, "host": f"h{node}", "version": "1", **fields})


class Lead:
    """A leader that listens, and what it was told."""

    def __init__(self, wait_s: float) -> None:
        self.told_to_leave = asyncio.Event()
        self.nodes: list[GroupNode] = []
        known = Roster(hello(0), 2, time.monotonic() + wait_s)
        self.group = GroupLeader(known, 9, "10.0.0.1", self._leave, self.nodes.extend)
        self.address = ""

    def _leave(self) -> None:
        self.told_to_leave.set()


@contextlib.asynccontextmanager
async def leading(wait_s: float = TIMEOUT_S) -> AsyncIterator[Lead]:
    lead = Lead(wait_s)
    server = new_server(BOTH, Refusals())
    rank_pb2_grpc.add_NodeGroupServicer_to_server(lead.group, server)
    lead.address = f"127.0.0.1:{listen(server, '127.0.0.1', 0, BOTH)}"
    await server.start()
    watching = asyncio.ensure_future(lead.group.watch())
    try:
        yield lead
    finally:
        watching.cancel()
        await server.stop(grace=0)


@contextlib.asynccontextmanager
async def following_at(address: str, said: NodeHello | None = None) -> AsyncIterator[tuple[GroupLink, Any]]:
    async with joined(address, OURS, said or hello(), TIMEOUT_S) as link:
        running = asyncio.ensure_future(link.run())
        try:
            yield link, running
        finally:
            running.cancel()
            await asyncio.wait((running,))


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


async def absent(words: str, lead: Lead) -> None:
    """Wait until the leader finds this node absent; empty: none."""
    while lead.group.absence() != words:  # noqa: ASYNC110  # a beat tells nobody here
        await asyncio.sleep(0.02)


async def refusal(address: str, trust: Trust, said: NodeHello, within_s: float = 0.0) -> DiptychError:
    with pytest.raises(DiptychError) as refused:
        async with joined(address, trust, said, within_s):
            pass
    return refused.value


def test_a_node_is_told_what_to_start_with_that_all_have_loaded_and_to_stop() -> None:
    async def test() -> None:
        async with leading() as lead, following_at(lead.address) as (link, running):
            lead.group.open(DOORS)
            start = (await link.next()).start
            assert (start.instance_id, start.host, start.doors) == (9, "10.0.0.1", DOORS)
            assert [(each.node, each.first_rank, each.num_ranks) for each in lead.nodes] == [(0, 0, 1), (1, 1, 1)]
            lead.group.loaded()
            assert (await link.next()).is_loaded
            link.tell(NodeSays(leaving=True))
            await lead.told_to_leave.wait()
            lead.group.stop()
            assert (await link.next()).stop
            await running  # it ends, and without an error
        assert not lead.group.lost.done()

    run(test)


def test_strangers_routers_and_nodes_unlike_their_leader_are_refused_in_words() -> None:
    async def test() -> None:
        async with leading() as lead:
            assert "wrong token" in str(await refusal(lead.address, THEIRS, hello()))
            assert "not for the token or certificate of a router" in str(await refusal(lead.address, ROUTERS, hello()))
            for said, words in ((hello(version="2"), "its version is 2"), (hello(2), "its --node-rank is 2")):
                error = await refusal(lead.address, OURS, said)
                assert isinstance(error, ConfigError)
                assert words in str(error)
            assert not lead.group.lost.done()

    run(test)


def test_a_second_node_of_one_number_is_refused_and_the_group_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "TAKEN_S", 0.1)

    async def test() -> None:
        async with leading() as lead, following_at(lead.address) as (_, running):
            error = await refusal(lead.address, OURS, hello(epoch=8), TIMEOUT_S)
            assert isinstance(error, PlaceTaken)
            assert "node 1 at h1 is in the group already" in str(error)
            assert not running.done()
            assert not lead.group.lost.done()

    run(test)


def test_a_node_waits_for_a_leader_that_comes_later_but_not_for_ever() -> None:
    async def test() -> None:
        error = await refusal("127.0.0.1:9", OURS, hello(), 0.3)
        assert isinstance(error, Unavailable)
        assert "did not let node 1 in within 0.3 s" in str(error)

    run(test)


def test_a_node_that_never_comes_ends_the_group_in_time() -> None:
    async def test() -> None:
        async with leading(wait_s=0.2) as lead:
            assert "node 1 did not come in time" in await lead.group.lost

    run(test)


def test_what_a_node_says_of_its_end_is_why_the_group_ends() -> None:
    async def test() -> None:
        async with leading() as lead, following_at(lead.address) as (link, _):
            link.tell(NodeSays(died="a rank of it ended with code -9"))
            words = await lead.group.lost
            assert words == "node 1 at h1: a rank of it ended with code -9"
            assert "ends: join the next" in str(await refusal(lead.address, OURS, hello()))
            lead.group.died(words)
            assert (await link.next()).died == words

    run(test)


def test_the_end_of_a_nodes_process_ends_the_group_at_once() -> None:
    async def test() -> None:
        async with leading() as lead:
            async with following_at(lead.address):
                pass
            assert "the connection to node 1 at h1 has ended" in await lead.group.lost, "not: has not been heard"

    run(test)


def test_the_end_of_the_leaders_process_ends_its_nodes_at_once() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with leading() as lead:
                _, running = await stack.enter_async_context(following_at(lead.address))
            with pytest.raises(GroupEnded, match="the connection to the leader has ended"):
                await running

    run(test)


@pytest.mark.integration
def test_a_node_tells_with_its_beats_that_a_rank_of_it_was_stopped_and_goes_on() -> None:
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def test() -> None:
        async with leading() as lead, following_at(lead.address) as (link, _):
            link.has_started([rank.pid])
            rank.send_signal(signal.SIGSTOP)
            await absent("a process of node 1 at h1 was stopped", lead)
            rank.send_signal(signal.SIGCONT)
            await absent("", lead)
            assert not lead.group.lost.done()

    run(test)
    rank.communicate(b"\n")


def test_a_leader_that_fails_says_so_to_its_nodes() -> None:
    async def test() -> None:
        async with leading() as lead, following_at(lead.address) as (link, _):
            with contextlib.suppress(RuntimeError), lead.group.ending():
                raise RuntimeError
            assert (await link.next()).died == "its leader has failed: see its log"

    run(test)


def test_what_a_leader_says_while_a_beat_is_on_its_way_is_not_lost() -> None:
    async def test() -> None:
        group = GroupLeader(Roster(hello(0), 2, 0.0), 9, "10.0.0.1", lambda: None, lambda _: None)
        told = group._until(asyncio.get_running_loop().create_future())
        assert (await anext(told)).beat
        group.open(DOORS)
        assert (await anext(told)).start.doors == DOORS
        group.stop()
        assert (await anext(told)).stop
        assert [said async for said in told] == []

    run(test)


def test_a_leader_whose_stream_is_cancelled_leaves_nobody_waiting_for_news() -> None:
    async def test() -> None:
        group = GroupLeader(Roster(hello(0), 2, 0.0), 9, "10.0.0.1", lambda: None, lambda _: None)
        told = group._until(asyncio.get_running_loop().create_future())
        await anext(told)
        before = asyncio.all_tasks()
        waiting = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    run(test)


class Cable:
    """What lies between a node and its leader: connections, until it is cut and nobody is told."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        self._whole.clear()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, target)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._whole.wait()
            target.write(data)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def cable_to(address: str) -> AsyncIterator[tuple[Cable, str]]:
    cable = Cable(address)
    server = await asyncio.start_server(cable.accept, "127.0.0.1", 0)
    try:
        yield cable, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await cable.close()


def test_a_cut_link_is_blamed_within_two_seconds_and_ends_the_group_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (roster, following):
        monkeypatch.setattr(module, "SILENCE_S", 1.5)  # in place of 5: the test waits for it

    async def test() -> None:
        async with (
            leading() as lead,
            cable_to(lead.address) as (cable, address),
            following_at(address) as (_, running),
        ):
            await absent("", lead)
            cable.cut()
            assert re.fullmatch(r"node 1 at h1 has not been heard for \d\.\d s", await lead.group.lost)
            assert lead.group.absence() == "node 1 at h1 is not heard"
            with pytest.raises(GroupEnded, match=r"the leader has not been heard for \d\.\d s"):
                await running

    run(test)
