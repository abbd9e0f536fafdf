from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from diptych.cli.plans.processes import Component
from diptych.cli.platform.log_view import LogView
from diptych.cli.platform.supervisor import Child, ComponentFailed, End, Supervisor
from diptych.common.event_loop import Stop
from diptych.common.members.heartbeat import SharedHeartbeat, new_heartbeat
from diptych.common.proc import own_memory
from diptych.common.verdicts.restart_policy import RestartPolicy
from diptych.common.verdicts.watch import Bounds

pytestmark = pytest.mark.integration

TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
BOOTSTRAP = Component("bootstrap", ("bootstrap", "--port", "0"))  # runs until it is stopped
WRONG = Component("wrong", ("bootstrap", "--port", "none"))  # cannot start
WHEN_A_FILE_APPEARS = """
import os, threading, time

def act():
    while not os.path.exists(os.environ["TRIGGER"]):
        time.sleep(0.05)
    os.unlink(os.environ["TRIGGER"])
    {}

threading.Thread(target=act, daemon=True).start()
"""
HANG = "import re; re.match('(a+)+$', 'a' * 60 + 'b')"  # it holds the interpreter's lock
EAT = "held = []\n    while True: held.append(b'x' * (8 << 20)); time.sleep(0.02)"


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

    async def serves(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.ready.wait()

    async def ends(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.task

    async def stops(self) -> None:
        self.stop.set()
        await self.ends()

    async def is_cancelled(self) -> None:
        """Cancel it while it stops."""
        self.stop.set()
        await self.out.contains("stopping")
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.ends()


def children() -> list[psutil.Process]:
    """Our own child processes that are components."""
    everyone = psutil.Process().children()
    return [child for child in everyone if child.is_running() and "diptych.cli" in child.cmdline()]


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> list[SharedHeartbeat]:
    """Those of all components that were started, the first one first."""
    found: list[SharedHeartbeat] = []

    @contextmanager
    def noted() -> Iterator[tuple[SharedHeartbeat, int]]:
        with new_heartbeat() as (heartbeat, descriptor):
            found.append(heartbeat)
            yield heartbeat, descriptor

    monkeypatch.setattr("diptych.cli.platform.supervisor.new_heartbeat", noted)
    return found


async def all_beat(heartbeats: list[SharedHeartbeat]) -> None:
    """Wait until every loop came round once: before that nobody is judged."""
    while not all(heartbeat.last_s for heartbeat in heartbeats):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)


def test_it_starts_shows_and_stops_a_component() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, ready_when="bootstrap info    bootstrap at 127.0.0.1:")
        await run.serves()
        assert len(children()) == 1
        await run.stops()
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
        await run.serves()
        (first,) = children()
        first.kill()
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        assert "bootstrap died (killed by SIGKILL): restarting in 0.01 s" in run.out.getvalue()
        await run.stops()

    asyncio.run(test())


def test_a_component_that_freezes_while_serving_is_ended_and_started_again_and_a_patient_one_goes_on(
    heartbeats: list[SharedHeartbeat],
) -> None:
    async def test() -> None:
        impatient = dataclasses.replace(BOOTSTRAP, name="frozen", bounds=Bounds(patience_s=0.5))
        run = Run(BOOTSTRAP, impatient)
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        await run.serves()
        await all_beat(heartbeats)
        both = children()
        for child in both:
            child.suspend()  # deaf to SIGTERM
        await run.out.contains("frozen was ended: it froze: its event loop has not come round for")
        await run.out.contains("bootstrap at 127.0.0.1:", times=3)
        (staying,) = set(both) & set(children())
        staying.resume()
        assert "frozen died (it froze: its event loop" in run.out.getvalue()
        await run.stops()

    asyncio.run(test())


def test_a_component_whose_loop_hangs_in_one_long_computation_is_ended_and_started_again(
    tmp_path: Path, heartbeats: list[SharedHeartbeat]
) -> None:
    """From when a file appears: its successor finds none."""
    (tmp_path / "sitecustomize.py").write_text(WHEN_A_FILE_APPEARS.format(HANG))

    async def test() -> None:
        environment = {"PYTHONPATH": str(tmp_path), "TRIGGER": str(tmp_path / "now")}
        run = Run(dataclasses.replace(BOOTSTRAP, environment=environment, bounds=Bounds(patience_s=0.5)))
        await run.out.contains("bootstrap at 127.0.0.1:")
        await run.serves()
        await all_beat(heartbeats)
        (tmp_path / "now").touch()
        await run.out.contains("bootstrap was ended: it froze: its event loop has not come round for")
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        await run.stops()

    asyncio.run(test())


def test_a_component_that_takes_ever_more_memory_is_ended_alone_and_started_again(tmp_path: Path) -> None:
    """From when a file appears: its successor finds none."""
    (tmp_path / "sitecustomize.py").write_text(WHEN_A_FILE_APPEARS.format(EAT))
    limit_bytes = 400 << 20

    async def test() -> None:
        hungry = dataclasses.replace(
            BOOTSTRAP,
            name="hungry",
            environment={"PYTHONPATH": str(tmp_path), "TRIGGER": str(tmp_path / "now")},
            bounds=Bounds(memory_bytes=limit_bytes),
        )
        run = Run(BOOTSTRAP, hungry)
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        await run.serves()
        ours, both = own_memory(os.getpid()), children()
        (tmp_path / "now").touch()
        await run.out.contains("hungry was ended: it reached its memory limit of 400 MiB with")
        await run.out.contains("bootstrap at 127.0.0.1:", times=3)
        (staying,) = set(both) & set(children())
        assert own_memory(staying.pid) < limit_bytes / 2
        assert own_memory(os.getpid()) - ours < limit_bytes  # with both components
        assert "hungry died (it reached its memory limit of 400 MiB with" in run.out.getvalue()
        await run.stops()

    asyncio.run(test())


def test_a_host_without_memory_ends_components_before_whoever_started_them() -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    async def test() -> None:
        run = Run(BOOTSTRAP)
        await run.out.contains("bootstrap at 127.0.0.1:")
        (child,) = children()
        assert score(child.pid) == min(1000, score(os.getpid()) + 500)
        await run.stops()

    asyncio.run(test())


def test_how_a_component_ended_is_known_though_it_died_just_before_it_was_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asyncio, which is late to ask for the exit code here, finds that nobody else has taken it."""
    told = threading.Event()
    wait = os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        assert told.wait(TIMEOUT_S)
        return wait(pid, options)

    async def test() -> None:
        monkeypatch.setattr(os, "waitpid", late)
        with new_heartbeat() as (_, descriptor):
            child = await Child.start(BOOTSTRAP, lambda line: None, descriptor)
        os.kill(child.pid, signal.SIGKILL)
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        child.terminate()
        told.set()
        assert await child.wait() == End(-signal.SIGKILL)

    asyncio.run(test())


def test_a_component_that_was_told_to_stop_stays_away() -> None:
    async def test() -> None:
        run = Run(BOOTSTRAP, ready_when="bootstrap at 127.0.0.1:")
        await run.serves()
        (first,) = children()
        first.terminate()
        await run.out.contains("bootstrap was told to stop, and did: it is not started again")
        assert children() == []
        await run.stops()

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
        await run.serves()
        (child,) = children()
        child.suspend()  # deaf to SIGTERM
        await run.is_cancelled()
        assert children() == []

    asyncio.run(test())


def test_cancelling_waits_for_the_first_component_no_more_than_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cli.platform.supervisor._STOP_DEADLINE_S", 2 * TIMEOUT_S)  # nobody waits for that

    async def test() -> None:
        run = Run(BOOTSTRAP, dataclasses.replace(BOOTSTRAP, name="other"))
        await run.out.contains("bootstrap at 127.0.0.1:", times=2)
        for child in children():
            child.suspend()
        await run.is_cancelled()
        assert children() == []

    asyncio.run(test())


def test_no_component_outlives_a_supervisor_that_is_killed() -> None:
    program = """
        import asyncio, sys
        from diptych.cli.platform.log_view import LogView
        from diptych.cli.plans.processes import Component
        from diptych.cli.platform.supervisor import Supervisor

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
