"""Runs one component as a process: starts it in its own session, reads its lines, and stops it completely."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diptych.cli.platform.plan import Component
from diptych.common.lifecycle import PARENT_PID_VARIABLE
from diptych.common.members.heartbeat import DESCRIPTOR_VARIABLE
from diptych.common.process_sight import with_children

_MAX_LINE_BYTES = 4 * 2**20
_LAST_WORDS_S = 1.0  # how long to wait for the end of the output after the end of the process
_OOM_SCORE = 500  # as much as half of the machine's memory
_MAX_OOM_SCORE = 1000


@dataclass(frozen=True, slots=True)
class End:
    """How a component ended."""

    code: int  # exit code; negative: minus the signal that killed it
    because: str = ""  # why we ended it, if we did

    def __str__(self) -> str:
        if self.because:
            return self.because
        return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"

    @property
    def was_meant(self) -> bool:
        """It was told to stop, and did after it had handed over or finished what it had."""
        return self.code == 0


class Child:
    """A running component. Its own session keeps the terminal's Ctrl-C away: only we stop it."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._because = ""
        self._reading = asyncio.ensure_future(self._read(on_line))

    @classmethod
    async def start(cls, component: Component, on_line: Callable[[str], None], heartbeat_fd: int) -> Child:
        """Start `component`; `on_line` gets each line of its stdout and stderr. It beats into `heartbeat_fd`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "diptych.cli", *component.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(os.environ, component, heartbeat_fd),
            pass_fds=(heartbeat_fd,),
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        _offer_to_the_oom_killer(process.pid)
        return cls(process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> End:
        """Wait for the end and return how it came; nothing of its session is left then."""
        code = await self._process.wait()
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._reading
        return End(code, self._because)

    def terminate(self) -> None:
        """Ask it to stop.

        Not by `Process.terminate`: that looks whether the process has ended, and takes the exit code of one that just
        has from asyncio, which then makes one up.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self, because: str = "") -> None:
        """Kill it with everything that it has started; `because` becomes part of how it ended."""
        self._because = self._because or because
        _, *others = with_children(self.pid)  # some may have sessions of their own, and be deaf to other signals
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

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


def _offer_to_the_oom_killer(pid: int) -> None:
    """Have a host without memory end the component, or what it starts, before us and before strangers of its size."""
    with contextlib.suppress(OSError):  # not Linux, or it has ended
        ours = int(Path("/proc/self/oom_score_adj").read_text())
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(_MAX_OOM_SCORE, ours + _OOM_SCORE)))


def _environment(ours: Mapping[str, str], component: Component, heartbeat_fd: int) -> dict[str, str]:
    return {
        **ours,
        **component.environment,
        PARENT_PID_VARIABLE: str(os.getpid()),
        DESCRIPTOR_VARIABLE: str(heartbeat_fd),
        "DIPTYCH_LOG_FORMAT": "json",
        "OMP_NUM_THREADS": str(component.num_threads),
        "GOMP_SPINCOUNT": "0",  # idle OpenMP threads sleep: other processes need the cores
        "GRPC_VERBOSITY": ours.get("GRPC_VERBOSITY", "ERROR"),  # its notes on lost connections repeat ours
        "PYTHONUNBUFFERED": "1",
    }
