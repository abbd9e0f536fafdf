"""The embedded engine's way to its scheduler: prompts in as tokens, outputs back to whoever asked. Asyncio."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from diptych.common.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.engine.frontend.refusal import accepted
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.generation.codec import params_to_wire
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1 import admin_pb2, engine_pb2, inference_pb2, worker_pb2

_ERRORS: Final[dict[int, type[DiptychError]]] = {
    worker_pb2.ERROR_CODE_INVALID: InvalidRequest,
    worker_pb2.ERROR_CODE_OVERLOADED: Overloaded,
    worker_pb2.ERROR_CODE_DEADLINE: DeadlineExceeded,
    worker_pb2.ERROR_CODE_ABORTED: Unavailable,
}

Outputs = asyncio.Queue[worker_pb2.LegOutput | Exception]


class Scheduler(Protocol):
    """What computes the requests: one scheduler, or several that act as one."""

    @property
    def pids(self) -> tuple[int, ...]: ...

    async def ready(self) -> engine_pb2.SchedulerReady: ...

    def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        """What it says. Ends with `SchedulerDied`, which a request that is open then gets."""
        ...

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None: ...

    async def stop(self) -> None: ...


class TokenizerManager:
    """Tokenises prompts and carries requests to the scheduler and their outputs back."""

    def __init__(self, tokenizer: Tokenizer, scheduler: Scheduler) -> None:
        self.tokenizer = tokenizer
        self._scheduler = scheduler
        self._outputs: dict[int, Outputs] = {}
        self._queries = itertools.count(1)
        self._answers: dict[int, asyncio.Future[admin_pb2.AdminAnswer]] = {}
        self._death: SchedulerDied | None = None

    async def relay(self) -> None:
        """Hand each output to its request, until the scheduler ends; then fail all that are open."""
        try:
            async for events in self._scheduler.events():
                for output in events.outputs:
                    if output.room in self._outputs:
                        self._outputs[output.room].put_nowait(output)
                for answer in events.admin_answers:
                    self._answers.pop(answer.query).set_result(answer)
        except SchedulerDied as error:
            self._death = error
            for outputs in self._outputs.values():
                outputs.put_nowait(error)
            for answer_to in self._answers.values():
                answer_to.set_exception(error)

    async def administer(self, command: admin_pb2.AdminCommand) -> admin_pb2.AdminAnswer:
        """Have the scheduler execute a command. Raises its refusal, a `DiptychError`; then nothing has changed."""
        if self._death is not None:
            raise self._death
        command.query = next(self._queries)
        answer_to = self._answers[command.query] = asyncio.get_running_loop().create_future()
        await self._scheduler.send(engine_pb2.SchedulerCommands(admin=[command]))
        return accepted(await answer_to)

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, adapter: str = ""
    ) -> AsyncGenerator[worker_pb2.LegOutput, None]:
        """Yield the outputs of one request. Closing the iterator early aborts it."""
        async with self._room() as (room, outputs):
            sampling = params_to_wire(params)
            leg = worker_pb2.StartLeg(room=room, prompt_token_ids=prompt, sampling=sampling, lora=adapter)
            await self._scheduler.send(engine_pb2.SchedulerCommands(start=[leg]))
            while True:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                if output.HasField("error"):
                    raise _ERRORS.get(output.error.code, InternalError)(output.error.message)
                yield output
                if output.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                    return

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[tuple[int, Outputs]]:
        """A place for one request's outputs. Leaving it tells the scheduler, which ignores a room that has ended."""
        if self._death is not None:
            raise self._death
        room, outputs = secrets.randbits(64) or 1, Outputs()
        self._outputs[room] = outputs
        try:
            yield room, outputs
        finally:
            del self._outputs[room]
            if self._death is None:
                await self._scheduler.send(engine_pb2.SchedulerCommands(abort=[room]))
