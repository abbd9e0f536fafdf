"""The frontend's end of a scheduler: starts its processes, talks to rank 0, and notices when one dies. Asyncio.

Nothing is lost silently: when a process ends, the others are ended too, `events()` ends with `SchedulerDied`, and so
does every later one; what is sent to a dead scheduler is dropped. `PendingQueries` waits for what the scheduler was
asked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import zmq
import zmq.asyncio

from diptych.common.errors import (
    ConfigError,
    DiptychError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from diptych.common.members.heartbeat import SharedHeartbeat, new_heartbeat
from diptych.engine.nodes.company import Alone, Company
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.tensor_parallel.channels import make_keys
from diptych.engine.tensor_parallel.last_words import LOST
from diptych.kvtransfer.process import is_stopped
from diptych.v1 import admin_pb2, engine_pb2, worker_pb2

T = TypeVar("T")
logger = logging.getLogger(__name__)

SCHEDULER_MODULE: Final = "diptych.unified.scheduler"  # run as a process; nothing of it is imported here
_STOP_TIMEOUT_S: Final = 5.0
_STACKS_S: Final = 1.0  # for writing where each thread is
_LAST_WORDS_S: Final = 0.5  # from the first sign of a group's death until all that explains it is here
_ON_THE_WAY_MS: Final = 100  # what a process said before its end is read by then
_FIRST_WORDS_S: Final = 10.0  # likewise, while they start: ranks that refuse the same do so when each has imported all
_REFUSALS: Final[Mapping[str, type[DiptychError]]] = {
    error.grpc_status: error for error in (InvalidRequest, NotFound, Overloaded, Unavailable, ConfigError)
}


class SchedulerDied(InternalError):
    """A process of the scheduler ended on its own."""


def _desertion(words: str) -> str:
    return f"a part of the group is gone: {words}"


class Commands(Protocol):
    """What takes commands for a scheduler."""

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None: ...


class SchedulerClient:
    """One scheduler and the channel to it. Use `start_scheduler`, then `ready`, then `events` and `send`."""

    def __init__(
        self,
        processes: Sequence[asyncio.subprocess.Process],
        socket: zmq.asyncio.Socket,
        folder: str,
        heartbeat: SharedHeartbeat,
        company: Company | None = None,
    ) -> None:
        """`company`: ranks on other nodes."""
        self._company = company or Alone()
        self._companions: Sequence[SchedulerClient] = ()
        self._processes = processes  # by tensor-parallel rank, of those here
        self.pids = tuple(process.pid for process in processes)
        self._socket = socket
        self._folder = folder  # of the ipc sockets
        self.heartbeat = heartbeat  # of the loop
        self._is_ready = False
        self._early: list[engine_pb2.SchedulerCommands] = []  # before it is ready, hence maybe not connected yet
        self._last_reading = asyncio.Lock()  # held while the channel may not be closed: last words are read

    def absence(self) -> str:
        """Say whether a process of it was stopped, here or elsewhere, or a node is not heard; empty: none of it."""
        if any(map(is_stopped, self.pids)):
            return "a process of it was stopped"
        if any(is_stopped(pid) for companion in self._companions for pid in companion.pids):
            return "a scheduler that shares its experts was stopped"
        return self._company.absence()

    def share_with(self, companions: Sequence[SchedulerClient]) -> None:
        """Hear who shares our experts: none of them steps without all others."""
        self._companions = companions

    async def end_companions(self) -> None:
        """End those at once that share our experts, because a process of ours has ended. Each dies on its own."""
        await asyncio.gather(*(companion._kill() for companion in self._companions))

    async def ready(self) -> engine_pb2.SchedulerReady:
        """Wait until the model is loaded. Raises `SchedulerDied` with the scheduler's own words if it fails."""
        async for events in self.events():
            if events.HasField("rank_doors"):
                self._company.open(events.rank_doors)
            if events.HasField("ready"):
                self._company.loaded()
                # a connected socket needs its path no more, and a kill leaves nothing
                shutil.rmtree(self._folder, ignore_errors=True)
                self._is_ready = True
                for commands in self._early:
                    await self.send(commands)
                self._early.clear()
                return events.ready
        raise SchedulerDied("the scheduler ended before it was ready")

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        """Yield what the scheduler says, until `stop`; raise `SchedulerDied` when it ends on its own."""
        lost = asyncio.shield(self._company.lost)
        ends: list[asyncio.Future[Any]] = [lost, *(asyncio.ensure_future(each.wait()) for each in self._processes)]
        message: asyncio.Future[bytes] | None = None
        try:
            while not self._socket.closed:
                message = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait((message, *ends), return_when=asyncio.FIRST_COMPLETED)
                if message.cancelled():
                    return  # the channel was closed
                if not message.done():
                    message.cancel()
                    raise await (self._desert(lost.result()) if lost.done() else self._death(""))
                events = engine_pb2.SchedulerEvents.FromString(message.result())
                if events.fatal:
                    raise await self._death(events.fatal)
                yield events
        finally:
            if message is not None:
                message.cancel()  # it would take what the next one who listens waits for
            for end in ends:
                end.cancel()

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        """Send to the scheduler; what is said before it is ready, it hears first of all then.

        It may have been stopped: routers' sessions end behind it, and have their rooms aborted.
        """
        if not self._is_ready:
            self._early.append(commands)
            return
        if self._socket.closed:
            return
        try:
            await self._socket.send(commands.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:  # there is no limit of messages: nobody is connected
            logger.debug("the scheduler is gone; its death is about to be noticed")

    async def send_first(self, commands: engine_pb2.SchedulerCommands) -> None:
        """Send to a scheduler that starts, and waits for it. Cancel it when the scheduler is ready, or has ended."""
        await self._socket.send(commands.SerializeToString())

    async def stop(self) -> None:
        """Ask the processes to end, and end those that don't. Idempotent."""
        self._company.stop()
        if self._is_ready and all(process.returncode is None for process in self._processes):
            await self.send(engine_pb2.SchedulerCommands(shutdown=True))
            if not await self._all_end(_STOP_TIMEOUT_S):
                logger.warning("the scheduler did not stop within %g s: killing it, where it is now:", _STOP_TIMEOUT_S)
                await self._tell_stacks()
        await self._kill()
        async with self._last_reading:
            self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _death(self, fatal: str) -> SchedulerDied:
        """Return why the scheduler ended; end what is left of it.

        Of several ranks the first sign may come from one that merely lost its company, here or elsewhere.
        """
        if len(self._processes) > 1:
            await self._all_end(_LAST_WORDS_S if self._is_ready else _FIRST_WORDS_S)
        fatal = fatal or await self._last_words()
        codes = enumerate(process.returncode for process in self._processes)
        causes = [self._cause(rank, code) for rank, code in codes if code is not None and (rank or not fatal)]
        if fatal == LOST:
            causes += await self._causes_beside()
        gone = await self._company.last_words(_LAST_WORDS_S)
        words = "; ".join(filter(None, [*causes, fatal, gone and _desertion(gone)]))
        self._company.died(words)
        await self._kill()
        return SchedulerDied(words)

    async def _desert(self, words: str) -> SchedulerDied:
        """End what is here, because ranks elsewhere are gone; return why."""
        self._company.died(words)
        await self._kill()
        return SchedulerDied(_desertion(words))

    def _cause(self, rank: int, code: int) -> str:
        name = "the scheduler process" if len(self._processes) == 1 else f"tensor-parallel rank {rank}"
        return f"{name} ended with code {code}"

    async def _causes_beside(self) -> list[str]:
        """Wait for the first end of a process of those that share our experts; return which have ended."""
        ends = [asyncio.ensure_future(each.wait()) for other in self._companions for each in other._processes]
        if ends:
            await asyncio.wait(ends, timeout=_LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        return [
            f"of a scheduler that shares its experts, {other._cause(rank, process.returncode)}"
            for other in self._companions
            for rank, process in enumerate(other._processes)
            if process.returncode is not None
        ]

    async def _last_words(self) -> str:
        """Return why rank 0 ended, if it said so: its end may be noticed before what it said is here."""
        fatal = ""
        async with self._last_reading:
            while not fatal and not self._socket.closed and await self._socket.poll(_ON_THE_WAY_MS):
                fatal = engine_pb2.SchedulerEvents.FromString(await self._socket.recv()).fatal
        return fatal

    async def _all_end(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                for process in self._processes:
                    await process.wait()
        except TimeoutError:
            return False
        return True

    async def _tell_stacks(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGUSR2)
        await self._all_end(_STACKS_S)

    async def _kill(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def start_scheduler(
    config: SchedulerConfig, module: str = SCHEDULER_MODULE, company: Company | None = None
) -> SchedulerClient:
    """Start `python -m module` with `config`, once for each rank that is here."""
    folder = tempfile.mkdtemp(prefix="diptych-")  # private; and short: paths of sockets are limited to 107 bytes
    config = replace(config, endpoint=f"ipc://{folder}/scheduler", parent_pid=os.getpid())
    if config.place is not None:
        make_keys(config.endpoint)
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.bind(config.endpoint)
    with new_heartbeat() as (heartbeat, descriptor):
        lead = await _start_process(module, replace(config, heartbeat_fd=descriptor), descriptor)
        others = [await start_rank(replace(config, rank=rank), module) for rank in config.ranks_here[1:]]
    return SchedulerClient((lead, *others), socket, folder, heartbeat, company)


def share_experts(schedulers: Sequence[SchedulerClient]) -> None:
    """Let schedulers know of each other that step at once."""
    for scheduler in schedulers:
        scheduler.share_with([other for other in schedulers if other is not scheduler])


async def start_rank(config: SchedulerConfig, module: str = SCHEDULER_MODULE) -> asyncio.subprocess.Process:
    """Start a rank other than 0."""
    return await _start_process(module, config)


async def _start_process(module: str, config: SchedulerConfig, *descriptors: int) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", module, config.to_json())
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, pass_fds=descriptors)


class PendingQueries:
    """What a scheduler was asked and has not answered yet: its status, and commands of operators.

    It must hear of every answer; `death` ends with the scheduler, and so does every wait.
    """

    def __init__(self, scheduler: Commands, death: asyncio.Future[SchedulerDied]) -> None:
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
        answer = await self._ask(self._commands, command.query, commands)
        if answer.grpc_status:
            raise _REFUSALS.get(answer.grpc_status, InternalError)(answer.message)
        return answer

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
        if self._death.done():  # its socket may be closed
            raise self._death.result()
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
