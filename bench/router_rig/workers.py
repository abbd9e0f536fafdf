"""Workers without a model, many in a process: real gRPC, real registration, and a model of time instead of one of text.

    python -m router_rig.workers '{"bootstrap": ..., "model_id": ..., "workers": [[id, role, port], ...], ...}'

A prefill leg gives its first token when its prompt, and those before it, would have been computed, and ends. A decode
leg gives the others, an output a token, in a message a step for all requests as a real worker does; without a step time
all steps are in one message. Decode waits for nobody: what it says before prefill does, the router holds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from diptych.common.lifecycle import die_with_parent
from diptych.common.members.membership_client import Registration
from diptych.common.members.roles import WORKER_ROLES, LegKind, Role, leg_kind
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.generation.leg_prompt import prompt_len
from diptych.v1 import bootstrap_pb2, worker_pb2, worker_pb2_grpc
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.inference_pb2 import FINISH_REASON_LENGTH
from diptych.v1.worker_pb2 import LegOutput, LegStats, StartLeg, WorkerBatch

PAGE_SIZE: Final = 16
PAGE_NBYTES: Final = 1 << 20
NEWS_S: Final = 0.25  # at least, between two that a watcher is told
LINKS_S: Final = 1.0  # likewise, of links
STEPS_A_SECOND: Final = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What the processes of a benchmark agree on."""

    bootstrap: str
    model_id: str
    workers: Sequence[tuple[int, str, int]]  # of this process: instance id, role, port
    peers: Sequence[tuple[int, str]]  # everybody: instance id, role
    text: Sequence[int]  # tokens that every output is made of
    context_len: int
    prefill_s_per_token: float = 0.0
    step_s: float = 0.0  # between output tokens; 0: all come at once


@dataclass(slots=True)
class _Stream:
    """The session of one router: what runs for it, and what is due to it."""

    due: list[LegOutput] = field(default_factory=list)
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # room: (next token, all tokens)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, output: LegOutput) -> None:
        self.due.append(output)
        self.news.set()


class TimedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker; `run` it."""

    def __init__(self, instance: Instance, plan: Plan) -> None:
        self._instance = instance
        self._plan = plan
        self._role = WORKER_ROLES[instance.role]
        self._text = plan.text
        self._streams: list[_Stream] = []
        self._prefill_free_s = 0.0
        self._has_work = asyncio.Event()

    async def run(self, port: int) -> None:
        server = new_server(INSECURE, Refusals())
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        listen(server, "127.0.0.1", port, INSECURE)
        await server.start()
        registration = Registration([self._plan.bootstrap], INSECURE, lambda: self._instance)
        async with asyncio.TaskGroup() as group:
            group.create_task(registration.run())
            if self._plan.step_s:
                group.create_task(self._step_forever())

    async def GetStatus(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(instance=self._instance)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[WorkerBatch]:
        stream = _Stream()
        self._streams.append(stream)
        reading = asyncio.ensure_future(self._read(request_iterator, stream))
        try:
            while True:
                await stream.news.wait()
                stream.news.clear()
                outputs, stream.due = stream.due, []
                yield WorkerBatch(outputs=outputs)
        finally:
            self._streams.remove(stream)
            reading.cancel()

    async def Watch(self, request: worker_pb2.WatchWorkerRequest, context: Any) -> AsyncIterator[worker_pb2.WorkerNews]:
        """Tell of steps that never were and of a page that moved on every link, as a busy worker does: no oftener than
        the watcher wants, with all steps since, and of links once a second.
        """
        num_told, interval_s = 0, max(NEWS_S, request.interval_ms / 1e3)
        steps, links_every = _steps(interval_s), max(1, round(LINKS_S / interval_s))
        while True:
            has_links = num_told % links_every == 0
            num_told += 1
            yield worker_pb2.WorkerNews(status=self._status(num_told, has_links), steps=steps, has_links=has_links)
            await asyncio.sleep(interval_s)

    def _status(self, num_told: int, has_links: bool) -> worker_pb2.WorkerStatus:
        links = [
            worker_pb2.LinkStatus(
                peer_instance_id=peer,
                state=worker_pb2.LINK_STATE_UP,
                path="copy",
                bytes_per_s=1e10,
                bytes_sent=num_told * PAGE_NBYTES,
            )
            for peer in self._instance.load.linked_instances
        ]
        pages = {"free": 900_000, "owned": 90_000 + num_told, "cached": 10_000 - num_told % 100}
        return worker_pb2.WorkerStatus(instance=self._instance, pages_by_state=pages, links=links if has_links else ())

    async def _read(self, batches: Any, stream: _Stream) -> None:
        async for batch in batches:
            for leg in batch.start:
                self._start(leg, stream)
            for room in batch.abort:
                if stream.running.pop(room, None):
                    error = worker_pb2.LegError(code=worker_pb2.ERROR_CODE_ABORTED, message="aborted")
                    stream.send(LegOutput(room=room, error=error))

    def _start(self, leg: StartLeg, stream: _Stream) -> None:
        kind, num_tokens = leg_kind(leg.kind, self._role), leg.sampling.max_tokens
        num_prompt_tokens = prompt_len(leg)
        if kind is not LegKind.DECODE:
            stats = LegStats(queue_us=5, compute_us=50, prompt_tokens=num_prompt_tokens)
            first = LegOutput(room=leg.room, token_ids=self._text[:1], stats=stats)
            if kind is LegKind.PREFILL or num_tokens == 1:
                first.finish_reason = FINISH_REASON_LENGTH
            self._after_prefill(num_prompt_tokens, stream, first)
        if kind is LegKind.PREFILL or (kind is LegKind.LOCAL and num_tokens == 1):
            return
        if self._plan.step_s and num_tokens > 1:
            stream.running[leg.room] = (1, num_tokens)
            self._has_work.set()
        else:
            for index in range(1, max(2, num_tokens)):
                stream.send(self._token(leg.room, index, num_tokens))

    def _after_prefill(self, prompt_len: int, stream: _Stream, output: LegOutput) -> None:
        if not self._plan.prefill_s_per_token:
            stream.send(output)
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        begin_s, duration_s = max(now_s, self._prefill_free_s), prompt_len * self._plan.prefill_s_per_token
        self._prefill_free_s = begin_s + duration_s
        output.stats.queue_us, output.stats.compute_us = (round(1e6 * s) for s in (begin_s - now_s, duration_s))
        loop.call_at(self._prefill_free_s, stream.send, output)

    def _token(self, room: int, index: int, num_tokens: int) -> LegOutput:
        """Output token `index`, with the end behind the last one: a lone token has come from prefill."""
        token_ids = [self._text[index % len(self._text)]] if index < num_tokens else []
        output = LegOutput(room=room, first_index=index, token_ids=token_ids)
        if index + 1 >= num_tokens:
            output.finish_reason = FINISH_REASON_LENGTH
            output.stats.queue_us = 5
        return output

    async def _step_forever(self) -> None:
        loop, end_s = asyncio.get_running_loop(), 0.0
        while True:
            await self._has_work.wait()
            end_s = max(end_s, loop.time() - self._plan.step_s) + self._plan.step_s
            await asyncio.sleep(end_s - loop.time())
            for stream in self._streams:
                self._step(stream)
            if not any(stream.running for stream in self._streams):
                self._has_work.clear()

    def _step(self, stream: _Stream) -> None:
        for room, (index, num_tokens) in list(stream.running.items()):
            stream.send(self._token(room, index, num_tokens))
            if index + 1 < num_tokens:
                stream.running[room] = index + 1, num_tokens
            else:
                del stream.running[room]


def _steps(told_s: float) -> worker_pb2.StepRecords:
    """Return the steps of so many seconds."""
    number = max(1, round(told_s * STEPS_A_SECOND))
    return worker_pb2.StepRecords(
        began_s=[told_s * (1 - step / number) for step in range(number)],
        duration_s=[0.04] * number,
        prompt_tokens=[0] * number,
        output_tokens=[64] * number,
        requests=[64] * number,
    )


def _record(plan: Plan, instance_id: int, role_name: str, port: int) -> Instance:
    role = Role(role_name)
    instance = Instance(
        instance_id=instance_id,
        role=role.wire,
        address=f"127.0.0.1:{port}",
        model_id=plan.model_id,
        started_as=plan.model_id,
        compat="simulated",
        state=bootstrap_pb2.INSTANCE_STATE_READY,
        context_len=plan.context_len,
    )
    instance.transfer.layout.page_size = PAGE_SIZE
    instance.load.free_pages = instance.load.total_pages = instance.load.grantable_pages = 1_000_000
    linked = (peer for peer, name in plan.peers if peer != instance_id and role.exchanges_with(Role(name)))
    instance.load.linked_instances.extend(linked)
    return instance


async def _run(plan: Plan) -> None:
    async with asyncio.TaskGroup() as group:
        for instance_id, role, port in plan.workers:
            group.create_task(TimedWorker(_record(plan, instance_id, role, port), plan).run(port))


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(Plan(**json.loads(sys.argv[1]))))
