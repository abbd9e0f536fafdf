"""One component as a process of its own: started in its own session, read line by line, stopped without remains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diptych.cli.plan import Component
from diptych.common.lifecycle import PARENT_PID_VARIABLE

_MAX_LINE_BYTES = 4 * 2**20
_LAST_WORDS_S = 1.0  # how long to wait for the end of the output after the end of the process


@dataclass(frozen=True, slots=True)
class End:
    """How a component ended."""

    code: int  # of its exit; negative: minus the signal that killed it

    def __str__(self) -> str:
        return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"

    @property
    def was_meant(self) -> bool:
        """It was told to stop, and did after it had handed over or finished what it had."""
        return self.code == 0


class Child:
    """A running component. Its own session keeps the terminal's Ctrl-C away: only we stop it."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._reading = asyncio.ensure_future(self._read(on_line))

    @classmethod
    async def start(cls, component: Component, on_line: Callable[[str], None]) -> Child:
        """Start `component`; `on_line` gets each line of its stdout and stderr."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "diptych.cli", *component.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(os.environ, component),
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        return cls(process, on_line)

    async def wait(self) -> End:
        """Wait for the end and return how it came; nothing of its session is left then."""
        code = await self._process.wait()
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._reading
        return End(code)

    def terminate(self) -> None:
        """Ask it to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill it with everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and wait the moment until the system has let go of it."""
        self.kill()
        await self._process.wait()

    async def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit; asyncio has dropped what it had of it
                on_line("(an overlong line)")
                continue
            if not line:
                return
            on_line(line.decode(errors="replace").rstrip())


def _environment(ours: Mapping[str, str], component: Component) -> dict[str, str]:
    return {
        **ours,
        **component.environment,
        PARENT_PID_VARIABLE: str(os.getpid()),
        "DIPTYCH_LOG_FORMAT": "json",
        "OMP_NUM_THREADS": str(component.num_threads),
        "GOMP_SPINCOUNT": "0",  # idle OpenMP threads sleep: other processes need the cores
        "GRPC_VERBOSITY": ours.get("GRPC_VERBOSITY", "ERROR"),  # its notes on lost connections repeat ours
        "PYTHONUNBUFFERED": "1",
    }
