"""Keeps a set of components running: starts all, restarts those that die while serving, and stops all at the end.

A component that ends with exit code 0 was told to, as after a drain, and is not started again.

All are stopped at once except the first, on which the others depend: it is stopped when they have ended.

Until the platform is ready a death is final, because a second start would fail in the same way. Later the
`RestartPolicy` decides. However `run` ends, no child is left. A child that freezes, or takes more memory than it
may, is ended, and that is a death like any other.

`Child` runs one component as a process: starts it in its own session, reads its lines, and stops it completely.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.cli.plans.processes import Component
from diptych.cli.platform.log_view import LogView
from diptych.common.errors import DiptychError
from diptych.common.event_loop import Stop
from diptych.common.lifecycle import PARENT_PID_VARIABLE
from diptych.common.members.heartbeat import DESCRIPTOR_VARIABLE, SharedHeartbeat, new_heartbeat
from diptych.common.proc import with_children
from diptych.common.process_watch import wait_until_out_of_bounds
from diptych.common.verdicts.restart_policy import GiveUp, Restart, RestartPolicy

_STOP_DEADLINE_S = 10.0
_MAX_LINE_BYTES = 4 * 2**20
_LAST_WORDS_S = 1.0  # how long to wait for the end of the output after the end of the process
_OOM_SCORE = 500  # as much as half of the machine's memory
_MAX_OOM_SCORE = 1000


class ComponentFailed(DiptychError):
    """A component died and is not started again."""


class Supervisor:
    """Runs `components`. `wait_until_ready` returns when the platform serves."""

    def __init__(
        self,
        components: Sequence[Component],
        view: LogView,
        wait_until_ready: Callable[[], Awaitable[None]],
        policy: RestartPolicy | None = None,
    ) -> None:
        self._components = components
        self._view = view
        self._wait_until_ready = wait_until_ready
        self._policy = policy or RestartPolicy()
        self._is_ready = False
        self._shall_wait = True  # True: children that are told to stop may finish
        self._failure: ComponentFailed | None = None

    async def run(self, stop: Stop, on_ready: Callable[[], None]) -> None:
        """Run until `stop`; its `hurry` is passed on. Raises `ComponentFailed` when a component can't be kept running.

        Cancelling it kills the children instead of waiting for them.
        """
        async with asyncio.TaskGroup() as tasks:
            first, *others = [tasks.create_task(self._keep_running(component, stop)) for component in self._components]
            others.append(tasks.create_task(self._announce(on_ready)))
            try:
                await self._stop_in_turn(first, others, stop)
            except asyncio.CancelledError:
                self._shall_wait = False
                raise
        if self._failure is not None:
            raise self._failure

    async def _stop_in_turn(self, first: asyncio.Task[None], others: list[asyncio.Task[None]], stop: Stop) -> None:
        await stop.wait()
        self._view.log("stopping")
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        first.cancel()

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self._wait_until_ready()
        self._is_ready = True
        on_ready()

    async def _keep_running(self, component: Component, stop: Stop) -> None:
        deaths_s: list[float] = []
        while True:
            end = await self._run_once(component, stop)
            if end.was_meant and self._is_ready:
                self._view.log(f"{component.name} was told to stop, and did: it is not started again")
                return
            deaths_s.append(time.monotonic())
            decision = self._decide(component, str(end), deaths_s)
            if isinstance(decision, ComponentFailed):
                self._failure = self._failure or decision
                stop.set()
                return
            self._view.log(f"{component.name} died ({end}): restarting in {decision.delay_s:g} s", level="warning")
            await asyncio.sleep(decision.delay_s)

    def _decide(self, component: Component, end: str, deaths_s: Sequence[float]) -> Restart | ComponentFailed:
        if not self._is_ready:
            return ComponentFailed(f"{component.name} did not start ({end}); its last lines above say why")
        decision = self._policy.decide(deaths_s)
        if isinstance(decision, GiveUp):
            times = f"{decision.num_deaths} times within {decision.window_s:.0f} s"
            return ComponentFailed(f"{component.name} died {times} ({end}): giving up")
        return decision

    async def _run_once(self, component: Component, stop: Stop) -> End:
        """Run the component once and return how it ended. When cancelled, stop it."""
        with new_heartbeat() as (heartbeat, descriptor):
            child = await Child.start(component, lambda line: self._view.show(component.name, line), descriptor)
        watching = asyncio.ensure_future(self._watch(component, child, heartbeat))
        try:
            return await child.wait()
        except asyncio.CancelledError:
            if self._shall_wait and not await _stopped(child, stop):
                self._view.log(
                    f"{component.name} did not stop within {_STOP_DEADLINE_S:.0f} s: killed", level="warning"
                )
            raise
        finally:
            watching.cancel()
            await child.end()

    async def _watch(self, component: Component, child: Child, heartbeat: SharedHeartbeat) -> None:
        """End a component that passes its bounds. Until the platform is ready nobody's silence is judged."""
        reason = await wait_until_out_of_bounds(
            child.pid, heartbeat, component.bounds, is_judged=lambda: self._is_ready
        )
        self._view.log(f"{component.name} was ended: {reason}", level="error")
        child.kill(reason)


async def _stopped(child: Child, stop: Stop) -> bool:
    """Tell a component to stop, and again when it shall hurry; return whether it ended in time."""
    child.terminate()
    hurrying = asyncio.ensure_future(_hurry(child, stop))
    try:
        async with asyncio.timeout(_STOP_DEADLINE_S):
            await child.wait()
    except TimeoutError:
        return False
    finally:
        hurrying.cancel()
    return True


async def _hurry(child: Child, stop: Stop) -> None:
    await stop.hurry.wait()
    child.terminate()


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
