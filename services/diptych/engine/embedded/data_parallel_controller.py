"""Several scheduler groups behind one frontend, which sees them as one scheduler. Asyncio.

Each request goes to the group that the policy chooses, and its abort after it; everything else is for all groups. A
group that dies takes its own requests with it, each answered; the others go on. The last one's death is the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from diptych.engine.embedded.dispatch.dispatcher import Dispatcher
from diptych.engine.embedded.dispatch.policy import DispatchPolicy, RequestView
from diptych.engine.frontend.scheduler_client import SchedulerClient, SchedulerDied
from diptych.generation.page_hash import extra_key
from diptych.v1 import engine_pb2, inference_pb2, worker_pb2

logger = logging.getLogger(__name__)

_Said = tuple[int, engine_pb2.SchedulerEvents | SchedulerDied]


class DataParallelController:
    """Implements `Scheduler` over the schedulers of `groups`."""

    def __init__(self, groups: Sequence[SchedulerClient], policy: DispatchPolicy) -> None:
        self._groups = groups
        self._dispatcher = Dispatcher(len(groups), policy)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(pid for group in self._groups for pid in group.pids)

    async def ready(self) -> engine_pb2.SchedulerReady:
        """Wait until every group has loaded the model. Raises `SchedulerDied` if one fails."""
        readies = await asyncio.gather(*(group.ready() for group in self._groups))
        return min(readies, key=lambda ready: ready.context_len)

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        """Yield what the groups say, as it comes, until `stop`; raise `SchedulerDied` when the last one has died."""
        inbox: asyncio.Queue[_Said] = asyncio.Queue()
        listeners = [asyncio.create_task(_listen(rank, group, inbox)) for rank, group in enumerate(self._groups)]
        try:
            while True:
                rank, said = await inbox.get()
                yield self._bury(rank, said) if isinstance(said, SchedulerDied) else self._note(said)
        finally:
            for listener in listeners:
                listener.cancel()

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        for rank, share in self._split(commands).items():
            if share.ByteSize():
                await self._groups[rank].send(share)

    async def stop(self) -> None:
        """End every group. Idempotent."""
        await asyncio.gather(*(group.stop() for group in self._groups))

    def _split(self, commands: engine_pb2.SchedulerCommands) -> dict[int, engine_pb2.SchedulerCommands]:
        common = engine_pb2.SchedulerCommands()
        common.CopyFrom(commands)
        common.ClearField("start")
        common.ClearField("abort")
        shares = {rank: engine_pb2.SchedulerCommands() for rank in self._dispatcher.ranks}
        for share in shares.values():
            share.CopyFrom(common)
        for room in commands.abort:
            rank = self._dispatcher.rank_of(room)
            if rank is not None:
                shares[rank].abort.append(room)
        for leg in commands.start:
            shares[self._dispatch(leg)].start.append(leg)
        return shares

    def _dispatch(self, leg: worker_pb2.StartLeg) -> int:
        return self._dispatcher.start(leg.room, RequestView(leg.prompt_token_ids, extra_key(leg.cache_salt, leg.lora)))

    def _note(self, events: engine_pb2.SchedulerEvents) -> engine_pb2.SchedulerEvents:
        for output in events.outputs:
            self._dispatcher.answered(output.room, is_last=_is_last(output))
        return events

    def _bury(self, rank: int, death: SchedulerDied) -> engine_pb2.SchedulerEvents:
        rooms = self._dispatcher.lose(rank)
        if not self._dispatcher.ranks:
            raise death
        logger.error("scheduler group %d died with %d open requests; the others go on: %s", rank, len(rooms), death)
        error = worker_pb2.LegError(code=worker_pb2.ERROR_CODE_INTERNAL, message=f"its scheduler group died: {death}")
        return engine_pb2.SchedulerEvents(outputs=[worker_pb2.LegOutput(room=room, error=error) for room in rooms])


async def _listen(rank: int, group: SchedulerClient, inbox: asyncio.Queue[_Said]) -> None:
    try:
        async for events in group.events():
            inbox.put_nowait((rank, events))
    except SchedulerDied as death:
        inbox.put_nowait((rank, death))


def _is_last(output: worker_pb2.LegOutput) -> bool:
    return output.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED or output.HasField("error")
