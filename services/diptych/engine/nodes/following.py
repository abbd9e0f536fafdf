"""A node's end of its stream to the leader of its group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc

from diptych.common.errors import ConfigError, DiptychError, Unavailable
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import Trust
from diptych.engine.nodes.company import GroupEnded
from diptych.engine.nodes.leading import LOOK_S, STALL_S
from diptych.engine.nodes.roster import BEAT_S, SILENCE_S, PlaceTaken
from diptych.kvtransfer.process import is_stopped
from diptych.v1 import rank_pb2_grpc
from diptych.v1.rank_pb2 import LeaderSays, NodeHello, NodeSays

logger = logging.getLogger(__name__)

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
RETRY_S: Final = 0.2
TAKEN_S: Final = 5.0  # in which a leader notices that the node of this number that it knows is gone, and ends


class GroupLink:
    """A node in a group: what the leader says, and what it is told. `run` must be running."""

    def __init__(self, call: Any, first: LeaderSays, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._clock = clock
        self._outbox: asyncio.Queue[NodeSays] = asyncio.Queue()
        self._heard: asyncio.Queue[LeaderSays] = asyncio.Queue()
        self._note(first)
        self._heard_s = clock()
        self._pids: Sequence[int] = ()

    def has_started(self, pids: Sequence[int]) -> None:
        """Tell the leader from now on, with each beat, whether one of these ranks was stopped."""
        self._pids = pids

    def tell(self, said: NodeSays) -> None:
        self._outbox.put_nowait(said)

    async def next(self) -> LeaderSays:
        """Return what the leader says next that is no beat."""
        return await self._heard.get()

    async def run(self) -> None:
        """Return when the leader has said that the group ends. Raises `GroupEnded` when it is gone."""
        beside = [asyncio.ensure_future(work) for work in (self._write(), self._watch())]
        reading = asyncio.ensure_future(self._read())
        try:
            done, _ = await asyncio.wait((reading, *beside), return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in (reading, *beside):
                each.cancel()

    async def flush(self) -> None:
        """Wait a moment until what was told is on its way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._outbox.join()

    async def _write(self) -> None:
        while True:
            said = NodeSays(beat=True, is_stopped=any(map(is_stopped, self._pids)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    said = await self._outbox.get()
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # its end is read
                await self._call.write(said)
            if not said.beat:
                self._outbox.task_done()

    async def _read(self) -> None:
        try:
            while (said := await self._call.read()) is not _EOF:
                self._heard_s = self._clock()
                self._note(said)
                if said.stop or said.died:
                    return
            raise GroupEnded("the leader has ended the connection")
        except grpc.RpcError as error:
            raise GroupEnded(f"the connection to the leader has ended: {error.details()}") from None

    def _note(self, said: LeaderSays) -> None:
        if not said.beat:
            self._heard.put_nowait(said)

    async def _watch(self) -> None:
        looked_s = self._clock()
        while True:
            await asyncio.sleep(LOOK_S)
            looked_s, before_s = self._clock(), looked_s
            if looked_s - before_s > STALL_S:  # nobody could be heard: we did not listen
                self._heard_s += looked_s - before_s
            if looked_s - self._heard_s > SILENCE_S:
                raise GroupEnded(f"the leader has not been heard for {looked_s - self._heard_s:.1f} s")


@contextlib.asynccontextmanager
async def joined(leader: str, trust: Trust, hello: NodeHello, within_s: float) -> AsyncIterator[GroupLink]:
    """Join the group of a leader, which may come later than this node.

    Raises `ConfigError` with the leader's words where it refuses, and `Unavailable` when the time is up.
    """
    async with open_channel(leader, trust) as channel:
        stub = rank_pb2_grpc.NodeGroupStub(channel)
        call, first = await _knock(stub, hello, within_s)
        try:
            yield GroupLink(call, first)
        finally:
            call.cancel()


async def _knock(stub: Any, hello: NodeHello, within_s: float) -> tuple[Any, LeaderSays]:
    """Ask until the leader lets this node in."""
    began_s = time.monotonic()
    while True:
        call = stub.Join()
        try:
            await call.write(NodeSays(hello=hello))
            first = await call.read()
            if first is not _EOF:
                return call, first
            words = "it ended the connection"
        except (grpc.RpcError, asyncio.InvalidStateError):
            waited_s = time.monotonic() - began_s
            words = _words_to_wait(await call.code(), await call.details(), waited_s)
        if time.monotonic() - began_s > within_s:
            raise Unavailable(f"the leader did not let node {hello.node} in within {within_s:g} s: {words}")
        await asyncio.sleep(RETRY_S)


def _words_to_wait(code: grpc.StatusCode, details: str, waited_s: float) -> str:
    """Return why a node is not let in yet. Raises a `DiptychError` where waiting won't help."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return details
    if code is grpc.StatusCode.ALREADY_EXISTS and waited_s < TAKEN_S:
        return details
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise ConfigError("--leader is no leader of a group: it was started without --nnodes, or is no worker")
    error: type[DiptychError] = PlaceTaken if code is grpc.StatusCode.ALREADY_EXISTS else ConfigError
    raise error(f"the leader refuses this node: {details}")
