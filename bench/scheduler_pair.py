"""A prefill and a decode scheduler as real processes, linked over UCX: what hands KV over, and no more."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from diptych.engine.runtime.scheduler_client import SchedulerClient, ipc_endpoint, new_folder, start_scheduler
from diptych.engine.runtime.scheduler_config import EngineOptions, SchedulerConfig, Transports
from diptych.engine.transfer_rules import TransferRules
from diptych.v1 import bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

MODULES: Final = {"prefill": "diptych.prefill.scheduler", "decode": "diptych.decode.scheduler"}
TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class Leg:
    """What a scheduler said of a room."""

    token_ids: list[int] = field(default_factory=list)
    last: worker_pb2.LegOutput | None = None  # once it has ended


class Scheduler:
    """One of the two."""

    def __init__(self, role: str, instance_id: int) -> None:
        self.role = role
        self.instance_id = instance_id
        self.legs: dict[int, Leg] = defaultdict(Leg)
        self.linked: set[int] = set()
        self.status = worker_pb2.WorkerStatus()
        self.num_statuses = 0
        self._news = asyncio.Event()
        self._client: SchedulerClient
        self._reader: asyncio.Task[None]

    async def start(
        self, module: str, engine: EngineOptions, transfer: TransferRules, transports: Transports
    ) -> engine_pb2.SchedulerReady:
        folder = new_folder()
        config = SchedulerConfig(
            component=self.role,
            log_format="text",
            log_level="error",
            endpoint=ipc_endpoint(folder),
            parent_pid=os.getpid(),
            instance_id=self.instance_id,
            transports=transports,
            transfer=transfer,
            engine=engine,
        )
        self._client = await start_scheduler(module, config, folder)
        ready = await self._client.ready()
        self._reader = asyncio.create_task(self._read())
        return ready

    async def meet(self, other: int, transfer: bootstrap_pb2.TransferInfo) -> None:
        peer = bootstrap_pb2.Instance(instance_id=other, transfer=transfer)
        await self._client.send(engine_pb2.SchedulerCommands(peers=engine_pb2.PeerView(instances=[peer])))

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        await self._client.send(commands)

    async def wait_for(self, room: int) -> Leg:
        """Wait until a room has ended here."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.legs[room].last is None:
                await self._next()
        return self.legs[room]

    async def wait_until_linked(self, peer: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while peer not in self.linked:
                await self._next()

    async def ask_status(self) -> worker_pb2.WorkerStatus:
        seen = self.num_statuses
        await self._client.send(engine_pb2.SchedulerCommands(status_query=1))
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_statuses == seen:
                await self._next()
        return self.status

    async def stop(self) -> None:
        self._reader.cancel()
        await self._client.stop()

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _read(self) -> None:
        async for events in self._client.events():
            for output in events.outputs:
                leg = self.legs[output.room]
                leg.token_ids += output.token_ids
                if output.finish_reason or output.HasField("error"):
                    leg.last = output
            if events.HasField("load"):
                self.linked = set(events.load.linked_instances)
            if events.HasField("status"):
                self.status, self.num_statuses = events.status, self.num_statuses + 1
            self._news.set()


class SchedulerPair:
    """Use as an asynchronous context manager."""

    def __init__(
        self,
        engine: EngineOptions,
        transfer: TransferRules,
        transports: Transports = "auto",
        modules: Mapping[str, str] = MODULES,
    ) -> None:
        self._engine, self._transfer, self._transports, self._modules = engine, transfer, transports, modules
        self.prefill, self.decode = Scheduler("prefill", 11), Scheduler("decode", 22)

    async def __aenter__(self) -> Self:
        both = (self.prefill, self.decode)
        ready = await asyncio.gather(
            *(each.start(self._modules[each.role], self._engine, self._transfer, self._transports) for each in both)
        )
        await self.prefill.meet(self.decode.instance_id, ready[1].transfer)
        await self.decode.meet(self.prefill.instance_id, ready[0].transfer)
        await self.prefill.wait_until_linked(self.decode.instance_id)
        await self.decode.wait_until_linked(self.prefill.instance_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.prefill.stop()
        await self.decode.stop()

    async def request(self, room: int, prompt: Sequence[int], max_tokens: int = 2) -> tuple[Leg, Leg]:
        """Run one request; return what prefill and decode said."""
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, top_p=1.0)
        for side, peer in ((self.decode, self.prefill), (self.prefill, self.decode)):
            leg = worker_pb2.StartLeg(
                room=room, prompt_token_ids=prompt, sampling=sampling, peer_instance_id=peer.instance_id
            )
            await side.send(engine_pb2.SchedulerCommands(start=[leg]))
        return await self.prefill.wait_for(room), await self.decode.wait_for(room)
