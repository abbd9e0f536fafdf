"""What a frontend has asked its scheduler and is not answered yet: its status, and commands of operators."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import TypeVar

from diptych.engine.frontend.refusal import accepted
from diptych.engine.frontend.scheduler_client import SchedulerClient, SchedulerDied
from diptych.v1 import admin_pb2, engine_pb2, worker_pb2

T = TypeVar("T")


class Questions:
    """It must hear of every answer; `death` ends with the scheduler, and so does every wait."""

    def __init__(self, scheduler: SchedulerClient, death: asyncio.Future[SchedulerDied]) -> None:
        self._scheduler = scheduler
        self._death = death
        self._numbers = itertools.count(1)
        self._status = worker_pb2.WorkerStatus()  # that came last
        self._statuses: dict[int, asyncio.Future[worker_pb2.WorkerStatus]] = {}
        self._commands: dict[int, asyncio.Future[admin_pb2.AdminAnswer]] = {}

    async def status(self) -> worker_pb2.WorkerStatus:
        """Ask the scheduler how it is. Raises `SchedulerDied`."""
        number = next(self._numbers)
        return await self._ask(self._statuses, number, engine_pb2.SchedulerCommands(status_query=number))

    async def administer(self, command: admin_pb2.AdminCommand) -> admin_pb2.AdminAnswer:
        """Have the scheduler execute a command. Raises its refusal, a `DiptychError`; then nothing has changed."""
        command.query = next(self._numbers)
        commands = engine_pb2.SchedulerCommands(admin=[command])
        return accepted(await self._ask(self._commands, command.query, commands))

    def on_status(self, status: worker_pb2.WorkerStatus) -> None:
        """The scheduler says how it is; whom it answers follows."""
        self._status = status

    def on_status_answers(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            _answer(self._statuses, number, self._status)

    def on_admin_answers(self, answers: Iterable[admin_pb2.AdminAnswer]) -> None:
        for answer in answers:
            _answer(self._commands, answer.query, answer)

    async def _ask(
        self, answers: dict[int, asyncio.Future[T]], number: int, commands: engine_pb2.SchedulerCommands
    ) -> T:
        """Send a question and wait for its answer, which is put into `answers`. Raises `SchedulerDied`."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answers[number] = answer
        try:
            await self._scheduler.send(commands)
            await asyncio.wait((answer, self._death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answers.pop(number, None)
        if not answer.done():
            raise self._death.result()
        return answer.result()


def _answer(answers: dict[int, asyncio.Future[T]], number: int, value: T) -> None:
    answer = answers.pop(number, None)
    if answer is not None and not answer.done():
        answer.set_result(value)
