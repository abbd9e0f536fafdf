"""A worker without a model, for tests and measurements of a router: speaks the real protocol, fails on command.

It computes nothing: the caller says what the output of a leg is. A prefill leg gives its first token and ends; a decode
leg gives the others, one message a token, without waiting for prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import grpc

from diptych.common.rpc import SERVER_OPTIONS, listen
from diptych.router.simulated_admin import SimulatedAdmin
from diptych.v1 import admin_pb2_grpc, bootstrap_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from diptych.v1.worker_pb2 import LegOutput, LegStats, StartLeg, WorkerBatch

STATS: Final = LegStats(cached_tokens=3, pages_moved=2, bytes_moved=512, kv_digest=9, queue_us=5)

Output = tuple[Sequence[int], inference_pb2.FinishReason]  # all tokens of a request, and how it ends
Batches = asyncio.Queue[WorkerBatch | None]  # None: the session breaks


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a leg instead of its output number `after`."""

    kind: Literal["error", "break", "hang"]  # end the leg, break the session, or wait until released
    after: int = 0
    code: worker_pb2.ErrorCode = worker_pb2.ERROR_CODE_INTERNAL

    def output(self, room: int) -> LegOutput:
        return LegOutput(room=room, error=worker_pb2.LegError(code=self.code, message="told to fail"))


class SimulatedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker: a gRPC server, what came in, and what shall go wrong. Change it from its event loop only."""

    def __init__(
        self,
        instance: bootstrap_pb2.Instance,
        recite: Callable[[StartLeg], Output],
        on_event: Callable[[], None] = lambda: None,
        on_adapters: Callable[[], None] = lambda: None,
    ) -> None:
        self.instance = instance
        self.admin = SimulatedAdmin(instance, on_adapters)
        self.step_s = 0.0  # pause between outputs
        self.faults: list[Fault] = []  # each is used by one leg
        self.started: list[StartLeg] = []
        self.aborted: list[int] = []  # rooms
        self.num_resyncs = 0  # asked for by routers
        self.batch_sizes: list[tuple[int, int]] = []  # (starts, aborts) of each message
        self.running: dict[int, asyncio.Task[None]] = {}  # by room
        self.released = asyncio.Event()
        self.answers_as = instance.instance_id  # in GetStatus
        self._recite = recite
        self._on_event = on_event
        self._sessions: list[Batches] = []

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        admin_pb2_grpc.add_WorkerAdminServicer_to_server(self.admin, self._server)
        self.instance.address = f"127.0.0.1:{listen(self._server, '127.0.0.1', port)}"
        await self._server.start()

    async def stop(self) -> None:
        """Vanish, as a killed process does."""
        await self._server.stop(None)

    def say(self, batch: WorkerBatch) -> None:
        """Send something to every router."""
        for session in self._sessions:
            session.put_nowait(batch)

    async def GetStatus(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(instance=bootstrap_pb2.Instance(instance_id=self.answers_as))

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[WorkerBatch]:
        ready: Batches = asyncio.Queue()
        self._sessions.append(ready)
        reader = asyncio.ensure_future(self._read(request_iterator, ready))
        try:
            while (batch := await ready.get()) is not None:
                yield batch
        finally:
            self._sessions.remove(ready)
            for task in (reader, *self.running.values()):
                task.cancel()
            self.running.clear()
            self._on_event()

    async def _read(self, batches: Any, ready: Batches) -> None:
        async for batch in batches:
            self.num_resyncs += batch.resync_kv
            self.batch_sizes.append((len(batch.start), len(batch.abort)))
            for leg in batch.start:
                fault = self.faults.pop(0) if self.faults else None
                self.running[leg.room] = asyncio.ensure_future(self._run(leg, fault, ready))
                self.started.append(leg)
            for room in batch.abort:
                self._abort(room, ready)
            self._on_event()

    def _abort(self, room: int, ready: Batches) -> None:
        self.aborted.append(room)
        if room in self.running:
            self.running.pop(room).cancel()
            ready.put_nowait(_batch(Fault("error", code=worker_pb2.ERROR_CODE_ABORTED).output(room)))

    async def _run(self, leg: StartLeg, fault: Fault | None, ready: Batches) -> None:
        for number, output in enumerate(self._outputs(leg)):
            if fault is not None and fault.after == number:
                if fault.kind != "hang":
                    ready.put_nowait(_batch(fault.output(leg.room)) if fault.kind == "error" else None)
                    break
                await self.released.wait()
            ready.put_nowait(_batch(output))
            await asyncio.sleep(self.step_s)
        self.running.pop(leg.room, None)
        self._on_event()

    def _outputs(self, leg: StartLeg) -> Iterator[LegOutput]:
        tokens, finish = self._recite(leg)
        end = LegOutput(room=leg.room, first_index=max(1, len(tokens) - 1), finish_reason=finish, stats=STATS)
        if self.instance.role == bootstrap_pb2.ROLE_PREFILL:
            first = _with_logprobs(LegOutput(room=leg.room, token_ids=tokens[:1], stats=STATS), leg)
            if leg.sampling.HasField("prompt_logprobs"):
                scored = simulated_logprobs(leg.prompt_token_ids[1:], leg.sampling.prompt_logprobs)
                first.prompt_logprobs.CopyFrom(scored)
            yield first
        else:
            for index, token_id in enumerate(tokens[1:-1], start=1):
                yield _with_logprobs(LegOutput(room=leg.room, first_index=index, token_ids=[token_id]), leg)
            end.token_ids.extend(tokens[1:][-1:])
        yield _with_logprobs(end, leg) if end.token_ids else end


def simulated_logprobs(token_ids: Sequence[int], num_top: int) -> inference_pb2.TokenLogprobs:
    """A token's log-probability is minus a hundredth of its id; alternatives are the tokens from 0 on."""
    return inference_pb2.TokenLogprobs(
        logprobs=[-token_id / 100 for token_id in token_ids],
        num_top=num_top,
        top_ids=[top for _ in token_ids for top in range(num_top)],
        top_logprobs=[-top / 100 for _ in token_ids for top in range(num_top)],
    )


def _with_logprobs(output: LegOutput, leg: StartLeg) -> LegOutput:
    if leg.sampling.HasField("logprobs"):
        output.logprobs.CopyFrom(simulated_logprobs(output.token_ids, leg.sampling.logprobs))
    return output


def _batch(output: LegOutput) -> WorkerBatch:
    return WorkerBatch(outputs=[output])
