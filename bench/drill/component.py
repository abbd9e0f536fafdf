"""One process of the platform, with its children: started, ended gently or not, frozen, started again.

It runs as a session of its own: a signal for all of it misses nobody, and the terminal's Ctrl-C does not reach it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from diptych.common.lifecycle import PARENT_PID_VARIABLE
from drill.network import Host

ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "DIPTYCH_OPEN_API": "1"}  # the drill's own network keeps watch


class Component:
    """`diptych KIND --options` on a host."""

    def __init__(self, kind: str, name: str, host: Host, options: Mapping[str, object], log: Path) -> None:
        self.kind = kind
        self.name = name
        self.host = host
        self.log = log
        flags = [f"--{option}={value}" for option, value in options.items()]
        self._command = (*host.enter, sys.executable, "-m", "diptych.cli", kind, *flags)
        self.num_starts = 0
        self.start()

    def __str__(self) -> str:
        return self.name

    def start(self) -> None:
        self.num_starts += 1
        environment = {
            **os.environ,
            PARENT_PID_VARIABLE: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "DIPTYCH_OPEN_API": "1",
        }
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def pids(self) -> tuple[int, ...]:
        """Those of the process and of its children; they change with a restart only."""
        process = psutil.Process(self._process.pid)
        return (process.pid, *sorted(child.pid for child in process.children()))

    # ends

    async def leave(self, timeout_s: float) -> float:
        """SIGTERM to the process alone, as Kubernetes does; return after how many seconds all of it was gone."""
        began_s = time.monotonic()
        everybody = [psutil.Process(pid) for pid in self.pids]
        self._process.terminate()
        _, left = await asyncio.to_thread(psutil.wait_procs, everybody[1:], timeout_s)
        await asyncio.to_thread(self._process.wait, timeout_s)
        if left:
            raise TimeoutError(f"{self}: {left} are still there {timeout_s:g} s after SIGTERM")
        return time.monotonic() - began_s

    def kill(self) -> None:
        """kill -9 all of it."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def kill_one(self, rng: random.Random) -> None:
        """kill -9 the process or a child; the rest has to notice and to end."""
        process = psutil.Process(self._process.pid)
        rng.choice([process, *process.children()]).kill()

    def exited(self) -> asyncio.Future[int]:
        """Done when the process that there is now has ended: whoever lost a child takes a while to notice.

        Others may start it again before that is awaited, and then it is not the new one that is waited for.
        """
        return asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    # pauses

    def freeze(self, rng: random.Random) -> None:
        """SIGSTOP all of it, or only its children."""
        process = psutil.Process(self._process.pid)
        children = process.children()
        for each in rng.choice([children, [process, *children]]):
            each.suspend()

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self._process.pid, number)
