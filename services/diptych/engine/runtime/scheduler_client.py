"""The frontend's end of a scheduler process: starts it, talks to it, and notices when it dies. Asyncio.

Nothing is lost silently: when the process ends, `events()` ends with `SchedulerDied`, and so does every later send.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Final

import zmq
import zmq.asyncio

from diptych.common.errors import InternalError
from diptych.engine.runtime.scheduler_config import SchedulerConfig
from diptych.v1 import engine_pb2

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S: Final = 5.0


class SchedulerDied(InternalError):
    """The scheduler process ended on its own."""


class SchedulerClient:
    """One scheduler process and the channel to it. Use `start`, then `ready`, then `events` and `send`."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: str) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder  # of the ipc socket

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> engine_pb2.SchedulerReady:
        """Wait until the model is loaded. Raises `SchedulerDied` with the scheduler's own words if it fails."""
        async for events in self.events():
            if events.HasField("ready"):
                _remove_folder(self._folder)  # a connected socket needs its path no more, and a kill leaves nothing
                return events.ready
        raise SchedulerDied("the scheduler ended before it was ready")

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        """Yield what the scheduler says, until `stop`; raise `SchedulerDied` when it ends on its own."""
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                message = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait((message, ended), return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    message.cancel()
                    raise SchedulerDied(f"the scheduler process ended with code {ended.result()}")
                events = engine_pb2.SchedulerEvents.FromString(message.result())
                if events.fatal:
                    raise SchedulerDied(events.fatal)
                yield events
        finally:
            ended.cancel()

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        await self._socket.send(commands.SerializeToString())

    async def stop(self) -> None:
        """Ask the process to end, and end it if it doesn't. Idempotent."""
        if self._process.returncode is None:
            await self.send(engine_pb2.SchedulerCommands(shutdown=True))
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                logger.warning("the scheduler did not stop within %g s: killing it", _STOP_TIMEOUT_S)
                self._process.kill()
                await self._process.wait()
        self._socket.close(linger=0)
        _remove_folder(self._folder)


def ipc_endpoint(folder: str) -> str:
    return f"ipc://{folder}/scheduler"


async def start_scheduler(module: str, config: SchedulerConfig, folder: str) -> SchedulerClient:
    """Start `python -m module` with `config`, whose endpoint is `ipc_endpoint(folder)`."""
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.bind(config.endpoint)
    command = (sys.executable, "-m", module, config.to_json())
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    return SchedulerClient(process, socket, folder)


def new_folder() -> str:
    """Return a private folder for the ipc socket; short, because socket paths are limited to 107 bytes."""
    return tempfile.mkdtemp(prefix="diptych-")


def _remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
