"""Two schedulers as real processes, linked over UCX: what hands KV over, and no more."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from diptych.engine.frontend.scheduler_client import SchedulerClient, start_scheduler
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.scheduler.messages import outputs_said
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.lanes import Transports
from diptych.v1 import bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

MODULE: Final = "diptych.unified.scheduler"
NO_MODULES: Final[Mapping[str, str]] = {}
TIMEOUT_S: Final = 120.0  # kernels are compiled meanwhile


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
        self.context_len = 0
        self._news = asyncio.Event()
        self._client: SchedulerClient
        self._reader: asyncio.Task[None]

    async def start(
        self, module: str, engine: EngineOptions, transfer: TransferRules, transports: Transports
    ) -> engine_pb2.SchedulerReady:
        config = SchedulerConfig(
            component=self.role,
            log_format="text",
            log_level="error",
            instance_id=self.instance_id,
            transports=transports,
            transfer=transfer,
            engine=engine,
            role=self.role,
        )
        self._client = await start_scheduler(config, module)
        ready = await self._client.ready()
        self.context_len = ready.context_len
        self._reader = asyncio.create_task(self._read())
        return ready

    async def meet(self, other: int, transfer: bootstrap_pb2.TransferInfo) -> None:
        peer = bootstrap_pb2.Instance(instance_id=other, transfer=transfer)
        await self._client.send(engine_pb2.SchedulerCommands(peers=engine_pb2.PeerView(instances=[peer])))

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        await self._client.send(commands)

    async def start_leg(
        self,
        room: int,
        prompt: Sequence[int],
        max_tokens: int,
        kind: worker_pb2.LegKind,
        peer: int = 0,
        holder: worker_pb2.PrefixHolder | None = None,
    ) -> None:
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, top_p=1, ignore_eos=True)
        leg = worker_pb2.StartLeg(
            room=room, prompt_token_ids=prompt, sampling=sampling, peer_instance_id=peer, kind=kind, holder=holder
        )
        await self.send(engine_pb2.SchedulerCommands(start=[leg]))

    async def local(self, room: int, prompt: Sequence[int], max_tokens: int = 2) -> Leg:
        """Run one request here alone."""
        await self.start_leg(room, prompt, max_tokens, worker_pb2.LEG_KIND_LOCAL)
        return await self.wait_for(room)

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
            for output in outputs_said(events):
                leg = self.legs[output.room]
                leg.token_ids += output.token_ids
                if output.finish_reason or output.HasField("error"):
                    leg.last = output
            self.context_len = events.context_len or self.context_len
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
        modules: Mapping[str, str] = NO_MODULES,
        roles: tuple[str, str] = ("prefill", "decode"),
        decode_engine: EngineOptions | None = None,
    ) -> None:
        """`modules` are those of roles that have others than the real one; `decode_engine` is None where equal."""
        self._engines = (engine, decode_engine or engine)
        self._transfer, self._transports, self._modules = transfer, transports, modules
        self.prefill, self.decode = Scheduler(roles[0], 11), Scheduler(roles[1], 22)

    async def __aenter__(self) -> Self:
        both = (self.prefill, self.decode)
        ready = await asyncio.gather(
            *(
                each.start(self._modules.get(each.role, MODULE), engine, self._transfer, self._transports)
                for each, engine in zip(both, self._engines, strict=True)
            )
        )
        await self.prefill.meet(self.decode.instance_id, ready[1].transfer)
        await self.decode.meet(self.prefill.instance_id, ready[0].transfer)
        await self._wait_until_linked()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.prefill.stop()
        await self.decode.stop()

    async def wait_until_linked_anew(self) -> None:
        """Both have taken what was sent to them, and what links that closed is open again.

        Who closed a link says so with its next answer. The other one may say that it is open until the new one is up at
        the one that closed it; so it is asked again.
        """
        for _ in range(2):
            await self.prefill.ask_status()
            await self.decode.ask_status()
            await self._wait_until_linked()

    async def _wait_until_linked(self) -> None:
        await self.prefill.wait_until_linked(self.decode.instance_id)
        await self.decode.wait_until_linked(self.prefill.instance_id)

    async def request(self, room: int, prompt: Sequence[int], max_tokens: int = 2) -> tuple[Leg, Leg]:
        """Run one request; return what prefill and decode said."""
        return await self.exchange(room, prompt, self.prefill, self.decode, max_tokens)

    async def exchange(
        self, room: int, prompt: Sequence[int], prefill: Scheduler, decode: Scheduler, max_tokens: int = 2
    ) -> tuple[Leg, Leg]:
        """Run one request between two schedulers."""
        await decode.start_leg(room, prompt, max_tokens, worker_pb2.LEG_KIND_DECODE, prefill.instance_id)
        await prefill.start_leg(room, prompt, max_tokens, worker_pb2.LEG_KIND_PREFILL, decode.instance_id)
        return await prefill.wait_for(room), await decode.wait_for(room)
