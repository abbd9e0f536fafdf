from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from diptych.cli.log_view import LogView
from diptych.cli.plan import Component
from diptych.cli.supervisor import ComponentFailed, Supervisor
from diptych.common.lifecycle import Stop
from diptych.common.restart_policy import RestartPolicy

TIMEOUT_S = 60.0
BOOTSTRAP = Component("bootstrap", ("bootstrap", "--port", "0"))  # runs until it is stopped
WRONG = Component("wrong", ("bootstrap", "--port", "none"))  # cannot start


class Watched(io.StringIO):
    """Output that one can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.grew = asyncio.Event()

    def flush(self) -> None:
        self.grew.set()

    async def contains(self, text: str, *, times: int = 1) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.getvalue().count(text) < times:
                self.grew.clear()
                await self.grew.wait()


class Run:
    """A supervisor at work. It is ready as soon as all of `ready_when` was shown."""

    def __init__(self, *components: Component, ready_when: str = "") -> None:
        self.out = Watched()
        self.stop = Stop()
        self.ready = asyncio.Event()
        view = LogView(self.out, tuple(component.name for component in components), False)
        policy = RestartPolicy(max_deaths=3, first_delay_s=0.01)
        supervisor = Supervisor(components, view, lambda: self.out.contains(ready_when), policy)
        self.task = asyncio.ensure_future(supervisor.run(self.stop, self.ready.set))

    async def ends(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.task


def children() -> list[psutil.Process]:
    """Our own child processes that are components."""
    everyone = psutil.Process().children()
    return [child for child in everyone if child.is_running() and "diptych.cli" in child.cmdline()]


def test_it_starts_shows_and_stops_a_component() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, ready_when="bootstrap info    bootstrap at 127.0.0.1:")
        await asyncio.wait_for(run.ready.wait(), TIMEOUT_S)
        assert len(children()) == 1
        run.stop.set()
        await run.ends()
        assert children() == []

    asyncio.run(test())


def test_the_first_component_is_stopped_when_the_others_have_gone() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, dataclasses.replace(BOOTSTRAP, name="other"))
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        first, other = sorted(children(), key=lambda child: child.create_time())
        other.suspend()  # its end is held up
        run.stop.set()
        await run.out.contains("stopping")
        with pytest.raises(psutil.TimeoutExpired):
            first.wait(0.5)
        other.resume()
        await run.ends()
        assert children() == []

    asyncio.run(test())


def test_a_component_that_dies_while_serving_is_started_again() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, ready_when="bootstrap at 127.0.0.1:")
        await asyncio.wait_for(run.ready.wait(), TIMEOUT_S)
        (first,) = children()
        first.kill()
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        assert "bootstrap died (killed by SIGKILL): restarting in 0.01 s" in run.out.getvalue()
        run.stop.set()
        await run.ends()

    asyncio.run(test())


def test_a_component_that_was_told_to_stop_stays_away() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, ready_when="bootstrap at 127.0.0.1:")
        await asyncio.wait_for(run.ready.wait(), TIMEOUT_S)
        (first,) = children()
        first.terminate()
        await run.out.contains("bootstrap was told to stop, and did: it is not started again")
        assert children() == []
        run.stop.set()
        await run.ends()

    asyncio.run(test())


def test_a_component_that_keeps_dying_ends_everything() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, WRONG)
        with pytest.raises(ComponentFailed, match=r"wrong died 3 times within 30 s \(exit code 2\): giving up"):
            await run.ends()
        assert children() == []

    asyncio.run(test())


def test_a_component_that_cannot_start_ends_everything_at_once_with_its_own_words() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, WRONG, ready_when="never")
        with pytest.raises(ComponentFailed, match=r"wrong did not start \(exit code 2\)"):
            await run.ends()
        assert "--port must be a whole number, not 'none'" in run.out.getvalue()
        assert children() == []

    asyncio.run(test())


def test_cancelling_kills_instead_of_waiting() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, ready_when="bootstrap at 127.0.0.1:")
        await asyncio.wait_for(run.ready.wait(), TIMEOUT_S)
        (child,) = children()
        child.suspend()  # deaf to SIGTERM
        run.stop.set()
        await run.out.contains("stopping")
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.ends()
        assert children() == []

    asyncio.run(test())


def test_cancelling_waits_for_the_first_component_no_more_than_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cli.supervisor._STOP_DEADLINE_S", 2 * TIMEOUT_S)  # nobody waits for that

    async def test() -> None:
        run = Run(BOOTSTRAP, dataclasses.replace(BOOTSTRAP, name="other"))
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        for child in children():
            child.suspend()
        run.stop.set()
        await run.out.contains("stopping")
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.ends()
        assert children() == []

    asyncio.run(test())


def test_no_component_outlives_a_supervisor_that_is_killed() -> None:
    program = """
        import asyncio, sys
        from diptych.cli.log_view import LogView
        from diptych.cli.plan import Component
        from diptych.cli.supervisor import Supervisor

        async def main():
            component = Component("bootstrap", ("bootstrap", "--port", "0"))
            supervisor = Supervisor([component], LogView(sys.stdout, ("bootstrap",), False), asyncio.Event().wait)
            await supervisor.run(asyncio.Event(), lambda: None)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert "bootstrap at" in supervisor.stdout.readline()
        (child,) = psutil.Process(supervisor.pid).children()
        os.kill(supervisor.pid, signal.SIGKILL)
        child.wait(TIMEOUT_S)
