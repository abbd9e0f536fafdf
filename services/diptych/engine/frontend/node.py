"""The life of a node beside the leader of its group: it joins, starts its ranks, and ends with the group.

It has no sessions and is no member. What it has to say (a rank of its own died, it was told to stop) it says to the
leader, who drains, and tells all to stop. Whatever else ends the group ends this process with an error, so that an
orchestrator starts all nodes of the group again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from diptych.common.event_loop import Stop
from diptych.common.health.health import HealthServer
from diptych.common.members.roles import Role
from diptych.common.net.http_server import HttpServer
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.probes import Probes, Verdict
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.metrics import WorkerMetrics, metrics_app
from diptych.engine.frontend.node_start import follower_place, hello_of
from diptych.engine.frontend.scheduler_client import start_rank
from diptych.engine.frontend.scheduler_start import open_served, scheduler_config
from diptych.engine.nodes.company import GroupEnded
from diptych.engine.nodes.following import GroupLink, joined
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.tensor_parallel.channels import keep_key
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.rank_pb2 import GroupStart, LeaderSays, NodeSays

logger = logging.getLogger(__name__)

END_S: Final = 5.0  # that ranks get to end once the log has
WORDS_S: Final = 0.5  # from the end of a rank until the leader may have said why all end

T = TypeVar("T")
SCRAPE_GRACE_S: Final = 1
Ranks: TypeAlias = "Sequence[asyncio.subprocess.Process]"


async def follow(config: WorkerConfig, trust: Trust, role: Role, stop: Stop) -> None:
    """Be a node beside the leader until the group ends.

    Raises `GroupEnded` unless it was told to end, and `ConfigError` or `Unavailable` where it can't join.
    """
    hello = hello_of(config, role, open_served(config, role))
    node = Node(config, role)
    with HealthServer(config.host, config.health_port, node.probes):
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(_scraped(config, trust))
            joining = asyncio.ensure_future(
                stack.enter_async_context(joined(config.leader, trust, hello, config.node_wait_s))
            )
            if await _first_of(joining, stop.wait()):
                await node.serve(joining.result(), stop)


@contextlib.asynccontextmanager
async def _scraped(config: WorkerConfig, trust: Trust) -> AsyncIterator[None]:
    """Serve metrics of this process until the exit; those of the group are the leader's."""
    server = HttpServer(
        metrics_app(WorkerMetrics(trust.tls), list), config.host, config.metrics_port, stop_grace_s=SCRAPE_GRACE_S
    )
    running = asyncio.ensure_future(server.run())
    try:
        yield
    finally:
        server.stop()
        await running


class Node:
    """A node that joins, or has joined."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self._config = config
        self._role = role
        self._not_ready = "waiting for the leader"
        self.probes = Probes(live=self._live, ready=self._ready, startup=self._ready)

    async def serve(self, link: GroupLink, stop: Stop) -> None:
        """Run the ranks of this node. Raises `GroupEnded`."""
        logger.info("node %d: joined %s", self._config.node_rank, self._config.leader)
        self._not_ready = "the group loads"
        running, leaving = asyncio.ensure_future(link.run()), asyncio.ensure_future(_pass_on(stop, link))
        try:
            start = await _unless(running, _started(link))
            if start is not None:
                async with started_ranks(self._rank_config(start), start) as ranks:
                    link.has_started([each.pid for each in ranks])
                    await self._until_over(link, ranks, running)
        finally:
            leaving.cancel()
            running.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)  # what ended the stream is said already

    async def _until_over(self, link: GroupLink, ranks: Ranks, running: asyncio.Future[None]) -> None:
        """Return when the group has stopped, as it was told to. Raises `GroupEnded`."""
        told, end = asyncio.ensure_future(self._told_to_stop(link)), asyncio.ensure_future(_first_end(ranks))
        try:
            await asyncio.wait((told, end, running), return_when=asyncio.FIRST_COMPLETED)
            if end.done():  # maybe because others ended first, and the leader is about to say so
                await asyncio.wait((told, running), timeout=WORDS_S, return_when=asyncio.FIRST_COMPLETED)
            if not told.done() and not running.done():
                link.tell(NodeSays(died=end.result()))
                await link.flush()
                raise GroupEnded(end.result())
            await _unless(running, told)
            await _all_end(ranks)
        finally:
            told.cancel()
            end.cancel()

    async def _told_to_stop(self, link: GroupLink) -> None:
        """Return when the leader says that all stop. Raises `GroupEnded`."""
        while not (said := await link.next()).stop:
            _raise_if_over(said)
            if said.is_loaded:
                logger.info("the group is loaded")
                self._not_ready = ""

    def _rank_config(self, start: GroupStart) -> SchedulerConfig:
        place = follower_place(self._config, start.host, dict(start.doors.ports))
        return scheduler_config(self._config, self._role, Instance(instance_id=start.instance_id), place)

    def _live(self) -> Verdict:
        return Verdict(True, "it ends with its group")

    def _ready(self) -> Verdict:
        return Verdict(not self._not_ready, self._not_ready or "the group has loaded")


async def _started(link: GroupLink) -> GroupStart | None:
    """Wait until the leader says what to start; None: nothing any more. Raises `GroupEnded`."""
    while not (said := await link.next()).HasField("start"):
        _raise_if_over(said)
        if said.stop:
            return None
    return said.start


def _raise_if_over(said: LeaderSays) -> None:
    if said.died:
        raise GroupEnded(f"the group ends: {said.died}")


async def _pass_on(stop: Stop, link: GroupLink) -> None:
    """Have the group drain when this node is told to stop, and hurry when it is told again."""
    for event in (stop, stop.hurry):
        await event.wait()
        logger.info("told to stop: so is the group")
        link.tell(NodeSays(leaving=True))


@contextlib.asynccontextmanager
async def started_ranks(config: SchedulerConfig, start: GroupStart) -> AsyncIterator[Ranks]:
    """Run the ranks of this node until the exit."""
    folder = tempfile.mkdtemp(prefix="diptych-")  # private
    config = replace(config, endpoint=f"ipc://{folder}/scheduler", parent_pid=os.getpid())
    keep_key(config.endpoint, start.doors.key)
    ranks: list[asyncio.subprocess.Process] = []
    try:
        for rank in config.ranks_here:
            ranks.append(await start_rank(replace(config, rank=rank)))
        yield ranks
    finally:
        for process in ranks:
            if process.returncode is None:
                process.kill()
            await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _first_end(ranks: Ranks) -> str:
    """Return which rank ended first, in words."""
    ends = [asyncio.ensure_future(process.wait()) for process in ranks]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    codes = [process.returncode for process in ranks if process.returncode is not None]
    return f"a rank of it ended with code {codes[0]}"


async def _all_end(ranks: Ranks) -> None:
    """Wait until all ranks have seen the end of the log, or long enough."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            for process in ranks:
                await process.wait()


async def _first_of(work: asyncio.Future[Any], otherwise: Awaitable[object]) -> bool:
    """Return True when `work` is done; False, having cancelled it, when `otherwise` comes first. Raises its error."""
    other = asyncio.ensure_future(otherwise)
    try:
        await asyncio.wait((work, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait((work,))
        return False
    work.result()
    return True


async def _unless(running: asyncio.Future[None], work: Awaitable[T]) -> T:
    """Return what `work` brings. Raises `GroupEnded` when the stream breaks first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, running), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            running.result()  # it ends without an error once all is said
        return await task
    finally:
        task.cancel()
