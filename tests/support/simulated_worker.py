"""A worker without a model, for tests and measurements of a router: speaks the real protocol, fails on command.

It computes nothing: the caller says what the output of a leg is. A prefill leg gives its first token and ends; a decode
leg gives the others, one message a token, once the caller lets it; a local leg gives all. A leg that its role does
not serve is refused. A request that runs and is asked to move stands still, and is let go a step later; unless that is
not wanted any more: then it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import grpc
import numpy as np
from simulated_admin import SimulatedAdmin

from diptych.common.members.roles import WORKER_ROLES, LegKind, leg_kind
from diptych.common.net.ports import free_port
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.generation.leg_prompt import prompt_of
from diptych.v1 import admin_pb2_grpc, bootstrap_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from diptych.v1.worker_pb2 import LegOutput, LegStats, StartLeg, WorkerBatch, WorkerNews

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


async def _at_once(leg: StartLeg) -> None:
    """For decode legs that wait for nobody."""


_ABORTED: Final = Fault("error", code=worker_pb2.ERROR_CODE_ABORTED)
_HANDED_BACK: Final = Fault("error", code=worker_pb2.ERROR_CODE_HANDED_BACK)


class SimulatedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker: a gRPC server, what came in, and what shall go wrong. Change it from its event loop only."""

    def __init__(
        self,
        instance: bootstrap_pb2.Instance,
        recite: Callable[[StartLeg], Output],
        on_event: Callable[[], None] = lambda: None,
        on_record: Callable[[], None] = lambda: None,
        encode: Callable[[str, bool], Sequence[int]] = lambda text, add_special_tokens: text.encode(),
        pages_came: Callable[[StartLeg], Awaitable[None]] = _at_once,
        vector: Callable[[StartLeg], LegOutput] | None = None,
    ) -> None:
        """`pages_came` is waited for before a decode leg says its first word. `vector` answers legs without text."""
        self.vector = vector or simulated_vector
        self.instance = instance
        self.admin = SimulatedAdmin(instance, self._send_record)
        self.stats = STATS  # of every leg
        self.drafts = self.accepted_drafts = 0  # of each output of a decode or local leg but the first and the last
        self.step_s = 0.0  # pause between outputs
        self.let_go_s = 0.01  # pause before what moves is let go
        self.faults: list[Fault] = []  # each is used by one leg
        self.started: list[StartLeg] = []
        self.aborted: list[int] = []  # rooms
        self.routers: list[int] = []  # that introduced themselves, one a session
        self.num_resyncs = 0  # asked for by routers
        self.batch_sizes: list[tuple[int, int]] = []  # (starts, aborts) of each message with any
        self.tools: list[tuple[int, str]] = []  # that were called, by room
        self.running: dict[int, asyncio.Task[None]] = {}  # by room
        self._given: dict[int, tuple[int, LegOutput]] = {}  # by room: how many outputs, and the last
        self._held: dict[int, StartLeg] = {}  # that stand still, by the room in which they move
        self.released = asyncio.Event()
        self.answers_as = instance.instance_id  # in GetStatus
        self.refuses_sessions = False
        self.refused = asyncio.Event()  # a session
        self._recite = recite
        self._on_event = on_event
        self._on_record = on_record
        self._encode = encode
        self._pages_came = pages_came
        self._sessions: list[Batches] = []
        self.watchers: list[asyncio.Queue[WorkerNews | None]] = []
        self.news = WorkerNews(has_links=True)  # that a watcher hears first; without the record
        self._sessions_by_room: dict[int, Batches] = {}

    async def start(self, port: int = 0) -> None:
        self._server = new_server(INSECURE, Refusals())
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        admin_pb2_grpc.add_WorkerAdminServicer_to_server(self.admin, self._server)
        port = port or free_port()  # nobody else gets it while this one is stopped
        self.instance.address = f"127.0.0.1:{listen(self._server, '127.0.0.1', port, INSECURE)}"
        await self._server.start()

    @property
    def has_sessions(self) -> bool:
        return bool(self._sessions)

    async def stop(self) -> None:
        """Vanish, as a killed process does."""
        await self._server.stop(None)

    def drain(self) -> None:
        """Take nothing new from now on, and tell every router so."""
        self.instance.state = bootstrap_pb2.INSTANCE_STATE_DRAINING
        self.send(WorkerBatch(instance=self.instance))

    def hand_back(self) -> None:
        """End every open leg, for routers to have it done elsewhere."""
        for room, task in self.running.items():
            task.cancel()
            self._sessions_by_room[room].put_nowait(_batch(_HANDED_BACK.output(room)))
        self.running.clear()

    def send(self, batch: WorkerBatch) -> None:
        """Send something to every router."""
        for session in self._sessions:
            session.put_nowait(batch)

    async def GetStatus(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        if self.refuses_sessions:
            await self.refused.wait()
        record = bootstrap_pb2.Instance()
        record.CopyFrom(self.instance)
        record.instance_id = self.answers_as
        return worker_pb2.WorkerStatus(instance=record)

    async def Watch(self, request: worker_pb2.WatchWorkerRequest, context: Any) -> AsyncIterator[WorkerNews]:
        queue: asyncio.Queue[WorkerNews | None] = asyncio.Queue()
        first = WorkerNews()
        first.CopyFrom(self.news)
        first.status.instance.CopyFrom(self.instance)
        queue.put_nowait(first)
        self.watchers.append(queue)
        self._on_event()
        try:
            while (news := await queue.get()) is not None:
                yield news
        finally:
            self.watchers.remove(queue)
            self._on_event()

    def tell(self, news: WorkerNews | None) -> None:
        """Tell every watcher; None: their streams end."""
        for queue in self.watchers:
            queue.put_nowait(news)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[WorkerBatch]:
        if self.refuses_sessions:
            self.refused.set()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more sessions")
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
            if batch.router_instance_id:
                self.routers.append(batch.router_instance_id)
            if batch.start or batch.abort:
                self.batch_sizes.append((len(batch.start), len(batch.abort)))
            for leg in batch.start:
                self._unpack_prompt(leg)
                self.started.append(leg)
                if leg.moves_room:  # of a worker of any role
                    self._move(leg, ready)
                    continue
                if not WORKER_ROLES[self.instance.role].serves(self._kind(leg)):
                    ready.put_nowait(_batch(Fault("error", code=worker_pb2.ERROR_CODE_OVERLOADED).output(leg.room)))
                    continue
                fault = self._next_fault()
                self._sessions_by_room[leg.room] = ready
                self.running[leg.room] = asyncio.ensure_future(self._run(leg, fault, ready))
            self.tools += [(each.room, each.tool) for each in batch.tool_called]
            for room in batch.abort:
                self._abort(room, ready)
            self._on_event()

    def _unpack_prompt(self, leg: StartLeg) -> None:
        """Make `prompt_token_ids` all tokens of the prompt, for a test to read; a text stays, to be seen."""
        text_ids = self._encode(leg.prompt_text, leg.add_special_tokens) if leg.prompt_text else ()
        text, leg.prompt_text = leg.prompt_text, ""
        leg.prompt_token_ids[:] = [*text_ids, *(key for key in prompt_of(leg).tolist() if key >= 0)]
        leg.ClearField("prompt_tokens")
        leg.prompt_text = text

    def _kind(self, leg: StartLeg) -> LegKind:
        return leg_kind(leg.kind, WORKER_ROLES[self.instance.role])

    def _send_record(self) -> None:
        self.send(WorkerBatch(instance=self.instance))
        self._on_record()

    @property
    def _is_draining(self) -> bool:
        return self.instance.state == bootstrap_pb2.INSTANCE_STATE_DRAINING

    def _next_fault(self) -> Fault | None:
        if self._is_draining:
            return _HANDED_BACK
        return self.faults.pop(0) if self.faults else None

    def _move(self, leg: StartLeg, ready: Batches) -> None:
        task, fault = self.running.get(leg.moves_room), self._next_fault()
        if task is None or fault is not None:
            ready.put_nowait(_batch(_ABORTED.output(leg.room)))
            return
        task.cancel()
        self._sessions_by_room[leg.room] = ready
        self._held[leg.room] = next(each for each in self.started if each.room == leg.moves_room)
        ready.put_nowait(_batch(LegOutput(room=leg.room, token_ids=self._given[leg.moves_room][1].token_ids[-1:])))
        self.running[leg.room] = asyncio.ensure_future(self._let_go(leg, ready))

    async def _let_go(self, leg: StartLeg, ready: Batches) -> None:
        await asyncio.sleep(self.let_go_s)
        del self.running[leg.room], self._held[leg.room]
        if self.running.pop(leg.moves_room, None) is not None:
            ready.put_nowait(_batch(_HANDED_BACK.output(leg.moves_room)))
        end = LegOutput(room=leg.room, first_index=1, finish_reason=inference_pb2.FINISH_REASON_STOP, stats=self.stats)
        ready.put_nowait(_batch(end))
        self._on_event()

    def _abort(self, room: int, ready: Batches) -> None:
        self.aborted.append(room)
        if room in self.running:
            self.running.pop(room).cancel()
            ready.put_nowait(_batch((_HANDED_BACK if self._is_draining else _ABORTED).output(room)))
        held = self._held.pop(room, None)
        if held is not None and held.room in self.running:
            self.running[held.room] = asyncio.ensure_future(self._run(held, None, ready))

    async def _run(self, leg: StartLeg, fault: Fault | None, ready: Batches) -> None:
        num_given, _ = self._given.get(leg.room, (0, None))
        for number, output in enumerate(self._outputs(leg)):
            if number < num_given:
                continue  # it has stood still behind these
            if fault is not None and fault.after == number:
                if fault.kind != "hang":
                    ready.put_nowait(_batch(fault.output(leg.room)) if fault.kind == "error" else None)
                    break
                await self.released.wait()
            if number == 0 and self._kind(leg) is LegKind.DECODE:
                await self._pages_came(leg)
            ready.put_nowait(_batch(output))
            self._given[leg.room] = (number + 1, output)
            await asyncio.sleep(self.step_s)
        self.running.pop(leg.room, None)
        self._on_event()

    def _outputs(self, leg: StartLeg) -> Iterator[LegOutput]:
        if self._kind(leg) is LegKind.POOL:
            yield self.vector(leg)
            return
        tokens, finish = self._recite(leg)
        kind, stats = self._kind(leg), _stats(leg, self.stats)
        end = LegOutput(room=leg.room, first_index=max(1, len(tokens) - 1), finish_reason=finish, stats=stats)
        if kind is not LegKind.DECODE:
            yield _first_output(leg, tokens, stats)
        if kind is not LegKind.PREFILL:
            for index, token_id in enumerate(tokens[1:-1], start=1):
                output = LegOutput(room=leg.room, first_index=index, token_ids=[token_id])
                output.drafts, output.accepted_drafts = self.drafts, self.accepted_drafts
                yield _with_reports(output, leg)
            end.token_ids.extend(tokens[1:][-1:])
        yield _with_reports(end, leg) if end.token_ids else end


def _stats(leg: StartLeg, measured: LegStats) -> LegStats:
    if not leg.prompt_text:
        return measured
    stats = LegStats(prompt_tokens=len(leg.prompt_token_ids))
    stats.MergeFrom(measured)
    return stats


def simulated_vector(leg: StartLeg) -> LegOutput:
    """Three numbers: the sum of the prompt's tokens, their number, and the number of labels."""
    numbers = [float(sum(leg.prompt_token_ids)), float(len(leg.prompt_token_ids)), float(len(leg.label_token_ids))]
    vector = np.array([-number if leg.label_token_ids else number for number in numbers], "<f4").tobytes()
    return LegOutput(
        room=leg.room, token_ids=[0], finish_reason=inference_pb2.FINISH_REASON_LENGTH, stats=STATS, vector=vector
    )


def simulated_logprobs(
    token_ids: Sequence[int], num_top: int, asked_ids: Sequence[int] = ()
) -> inference_pb2.TokenLogprobs:
    """A token's log-probability is minus a hundredth of its id; alternatives are the tokens from 0 on."""
    return inference_pb2.TokenLogprobs(
        logprobs=[-token_id / 100 for token_id in token_ids],
        num_top=num_top,
        top_ids=[top for _ in token_ids for top in range(num_top)],
        top_logprobs=[-top / 100 for _ in token_ids for top in range(num_top)],
        asked_ids=asked_ids,
        asked_logprobs=[-asked / 100 for _ in token_ids for asked in asked_ids],
    )


def _first_output(leg: StartLeg, tokens: Sequence[int], stats: LegStats) -> LegOutput:
    first = LegOutput(room=leg.room, token_ids=tokens[:1], stats=stats)
    first.stats.ClearField("kv_digest")  # known when all pages have moved
    if leg.sampling.HasField("prompt_logprobs"):
        behind = leg.sampling.prompt_logprobs_start + 1
        scored = simulated_logprobs(leg.prompt_token_ids[behind:], leg.sampling.prompt_logprobs)
        first.prompt_logprobs.CopyFrom(scored)
    return _with_reports(first, leg)


def _with_reports(output: LegOutput, leg: StartLeg) -> LegOutput:
    if leg.sampling.HasField("logprobs"):
        asked = leg.sampling.logprob_token_ids
        output.logprobs.CopyFrom(simulated_logprobs(output.token_ids, leg.sampling.logprobs, asked))
    if leg.sampling.HasField("attention"):
        output.attention.CopyFrom(simulated_attention(output, leg.sampling.attention))
    if leg.sampling.hidden_states:
        output.hidden_states.CopyFrom(simulated_states(output))
    return output


def simulated_states(output: LegOutput) -> inference_pb2.HiddenStates:
    """Token i has i and a half."""
    indices = np.arange(output.first_index, output.first_index + len(output.token_ids))
    values = np.stack([indices, np.full(len(indices), 0.5)], axis=1)
    return inference_pb2.HiddenStates(size=2, values=values.astype("<f4").tobytes())


def simulated_attention(output: LegOutput, wish: inference_pb2.AttentionWish) -> inference_pb2.TokenAttention:
    """Token i looks at token i alone, in each layer."""
    layers, empty = wish.layers or [7], wish.top_k - 1
    indices = range(output.first_index, output.first_index + len(output.token_ids))
    positions = [position for index in indices for _ in layers for position in (index, *[-1] * empty)]
    weights = [0.5 if position >= 0 else 0.0 for position in positions]
    return inference_pb2.TokenAttention(layers=layers, top_k=wish.top_k, positions=positions, weights=weights)


def _batch(output: LegOutput) -> WorkerBatch:
    return WorkerBatch(outputs=[output])
