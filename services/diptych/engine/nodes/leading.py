"""The leader's end of the streams of a group: lets nodes join, tells them what to start with, and notices a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import grpc

from diptych.common.errors import DiptychError
from diptych.engine.nodes.roster import BEAT_S, Roster
from diptych.v1 import rank_pb2, rank_pb2_grpc
from diptych.v1.bootstrap_pb2 import GroupNode
from diptych.v1.rank_pb2 import GroupStart, LeaderSays, NodeSays, RankDoors

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1
STALL_S: Final = 0.5  # a look that comes so late says that this process was held up, not others


class GroupLeader(rank_pb2_grpc.NodeGroupServicer):
    """Implements `diptych.v1.NodeGroup`, and `Company`. `watch` must be running."""

    def __init__(
        self,
        roster: Roster,
        instance_id: int,
        host: str,
        on_leaving: Callable[[], None],
        on_complete: Callable[[list[GroupNode]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: IP address at which rank 0 listens.

        `on_leaving` is called when a node was told to stop, `on_complete` when all are here.
        """
        self.roster = roster
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._instance_id = instance_id
        self._host = host
        self._on_leaving = on_leaving
        self._on_complete = on_complete
        self._clock = clock
        self._said: list[LeaderSays] = []  # to all, in order
        self._news = asyncio.Event()  # of this length of `_said`
        self._is_stopping = False

    async def watch(self) -> None:
        """Notice who is silent or does not come, for ever."""
        looked_s = self._clock()
        while True:
            await asyncio.sleep(LOOK_S)
            looked_s, before_s = self._clock(), looked_s
            if looked_s - before_s > STALL_S:
                self.roster.excuse(looked_s - before_s)
            if words := self.roster.complaint(looked_s):
                self._lose(words)

    async def last_words(self, timeout_s: float) -> str:
        await asyncio.wait([self.lost], timeout=timeout_s)
        return self.lost.result() if self.lost.done() else ""

    def absence(self) -> str:
        return self.roster.absence(self._clock())

    def open(self, doors: RankDoors) -> None:
        self._say(LeaderSays(start=GroupStart(instance_id=self._instance_id, host=self._host, doors=doors)))

    def loaded(self) -> None:
        self._say(LeaderSays(is_loaded=True))

    def stop(self) -> None:
        self._end(LeaderSays(stop=True))

    def died(self, words: str) -> None:
        self._end(LeaderSays(died=words))

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Tell all nodes at the exit whether the group ends as it was told to."""
        try:
            yield
        except BaseException:
            self.died("its leader has failed: see its log")
            raise
        self.stop()

    async def Join(self, request_iterator: AsyncIterator[NodeSays], context: Any) -> AsyncIterator[LeaderSays]:
        hello = await _first(request_iterator, context)
        try:
            self.roster.join(hello, self._clock())
        except DiptychError as error:
            logger.warning("refused: %s", error)
            await context.abort(grpc.StatusCode[error.grpc_status], str(error))
        name = self.roster.name(hello.node)
        logger.info("%s has joined, started as %016x", name, hello.epoch)
        if not self.roster.missing:
            self._on_complete(self.roster.records())
        reading = asyncio.ensure_future(self._read(hello.node, request_iterator))
        try:
            async for said in self._until(reading):
                yield said
        finally:
            reading.cancel()
            self._lose(f"the connection to {name} has ended")

    async def _until(self, end: asyncio.Future[None]) -> AsyncIterator[LeaderSays]:
        """Yield that a node is let in, what is said to all, and beats, until its stream ends, or the group.

        More may be said while a yield waits: what was yielded alone is counted as told.
        """
        yield LeaderSays(beat=True)
        num_told = 0
        while not end.done():
            if num_told < len(self._said):
                yield self._said[num_told]
                num_told += 1
            elif self._is_stopping:
                return  # nothing follows
            elif not await self._has_news(end):
                yield LeaderSays(beat=True)

    async def _has_news(self, end: asyncio.Future[None]) -> bool:
        """Wait for a beat's time, or until more is said or `end`, and return whether one of both came."""
        news = asyncio.ensure_future(self._news.wait())
        try:
            done, _ = await asyncio.wait((news, end), timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        return bool(done)

    async def _read(self, node: int, said: AsyncIterator[NodeSays]) -> None:
        async for message in said:
            self.roster.heard(node, self._clock(), is_stopped=message.is_stopped)
            if message.died:
                self._lose(f"{self.roster.name(node)}: {message.died}")
            if message.leaving and not self._is_stopping:
                logger.info("%s was told to stop: the group drains", self.roster.name(node))
                self._on_leaving()

    def _say(self, said: LeaderSays) -> None:
        self._said.append(said)
        self._news.set()
        self._news = asyncio.Event()

    def _end(self, said: LeaderSays) -> None:
        """Say how the group ends, once."""
        if not self._is_stopping:
            self._is_stopping = True
            self.roster.end()
            self._say(said)

    def _lose(self, words: str) -> None:
        if not self._is_stopping and not self.lost.done():
            self.roster.end()
            self.lost.set_result(words)


async def _first(said: AsyncIterator[NodeSays], context: Any) -> rank_pb2.NodeHello:
    """Return who joins."""
    async for message in said:
        if message.HasField("hello"):
            return message.hello
        break
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message says who joins: hello")
    raise AssertionError("abort raises")
