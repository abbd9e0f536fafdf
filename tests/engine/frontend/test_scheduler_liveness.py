from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from diptych.engine.frontend.health import STOPPED_S, SchedulerLiveness
from diptych.kvtransfer.process import is_stopped
from diptych.v1 import engine_pb2

pytestmark = pytest.mark.integration

STALL_S = 60.0


class Beats(NamedTuple):
    """What the scheduler's loop tells of itself."""

    last_s: float | None


class Patient:
    """A scheduler that is a process that sleeps; the test answers for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.node = ""  # that is not heard
        self.heartbeat = Beats(0.0)
        self.pings: list[int] = []

    def absence(self) -> str:
        return "a process of it was stopped" if is_stopped(self.pid) else self.node

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        self.pings.append(commands.ping)


@pytest.fixture
def patient() -> Iterator[Patient]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    yield Patient(process.pid)
    process.kill()
    process.wait()
    process.stdin.close()


def silent_at(patient: Patient, moments_s: list[float], answered_after: int = 0) -> list[bool]:
    """Whether it counts as silent after a beat at each moment; it answers the first `answered_after` beats."""

    async def watch() -> list[bool]:
        now_s = 0.0
        liveness, seen = SchedulerLiveness(patient, STALL_S, clock=lambda: now_s), []
        for number, now_s in enumerate(moments_s):  # noqa: B007
            await liveness.beat()
            if number < answered_after:
                liveness.on_pong(patient.pings[-1])
            seen.append(liveness.silence.done())
        return seen

    return asyncio.run(watch())


def test_a_scheduler_that_answers_is_asked_again_and_never_silent(patient: Patient) -> None:
    assert silent_at(patient, [0.0, 100.0, 200.0], answered_after=3) == [False] * 3
    assert patient.pings == [1, 2, 3]


def test_a_long_step_is_no_silence_but_a_hang_is(patient: Patient) -> None:
    assert silent_at(patient, [0.0, STALL_S - 0.1, STALL_S]) == [False, False, True]
    assert patient.pings == [1]


def test_a_stopped_process_is_silent_soon(patient: Patient) -> None:
    os.kill(patient.pid, signal.SIGSTOP)
    os.waitpid(patient.pid, os.WUNTRACED)
    assert silent_at(patient, [0.0, STOPPED_S - 0.1, STOPPED_S]) == [False, False, True]


def test_a_step_that_beats_is_no_hang_however_long_it_takes(patient: Patient) -> None:
    """As one that encodes a large image on a slow CPU does, behind each layer of the tower."""

    async def watch() -> None:
        now_s = 0.0
        liveness = SchedulerLiveness(patient, STALL_S, clock=lambda: now_s)
        for beat in range(20):
            now_s = beat * STALL_S / 4
            patient.heartbeat = Beats(now_s)
            await liveness.beat()
        assert patient.pings == [1]
        assert not liveness.silence.done()
        now_s += STALL_S
        await liveness.beat()
        assert liveness.silence.done()

    asyncio.run(watch())


def test_a_scheduler_that_waits_for_a_node_that_is_not_heard_is_silent_soon_and_one_that_answers_is_not(
    patient: Patient,
) -> None:
    patient.node = "node 1 at h1 is not heard"
    assert silent_at(patient, [0.0, STOPPED_S - 0.1, STOPPED_S]) == [False, False, True]
    assert silent_at(patient, [0.0, 100.0, 200.0], answered_after=3) == [False] * 3


def test_an_answer_ends_the_silence(patient: Patient) -> None:
    async def watch() -> None:
        now_s = 0.0
        liveness = SchedulerLiveness(patient, STALL_S, clock=lambda: now_s)
        await liveness.beat()
        now_s = STALL_S
        await liveness.beat()
        assert "silent for 60 s" in str(liveness.silence.result())
        liveness.on_pong(1)
        assert not liveness.silence.done()
        await liveness.beat()
        assert patient.pings == [1, 2]

    asyncio.run(watch())


def told_at(patient: Patient, moments_s: list[float], beats_s: list[float | None]) -> list[int]:
    """How long it is told to be silent after each look, which finds such a beat."""

    async def watch() -> list[int]:
        now_s, told = 0.0, list[int]()
        liveness = SchedulerLiveness(patient, STALL_S, told.append, clock=lambda: now_s)
        for now_s, beat_s in zip(moments_s, beats_s, strict=True):  # noqa: B007
            patient.heartbeat = Beats(beat_s)
            await liveness.beat()
            assert (liveness.silent_s, liveness.is_silent.is_set()) == (told[-1], told[-1] > 0)
        return told

    return asyncio.run(watch())


def test_a_loop_that_does_not_come_round_is_told_as_silent_long_before_its_requests_are_done_elsewhere(
    patient: Patient,
) -> None:
    assert told_at(patient, [0.0, 1.9, 2.6, 9.9, 10.4, 10.9], [0.0, 0.0, 0.0, 0.0, 10.3, 10.8]) == [0, 0, 2, 9, 0, 0]


@pytest.mark.parametrize("longest_s", [0.5, 4.0])
def test_readiness_waits_for_three_times_the_silence_that_routers_go_by(patient: Patient, longest_s: float) -> None:
    async def watch() -> tuple[float, float]:
        now_s = 0.0
        liveness = SchedulerLiveness(patient, STALL_S, clock=lambda: now_s)
        beats_s = [0.0, longest_s, 2 * longest_s]  # and never again
        silent, unready = list[float](), list[float]()
        for look in range(80):
            now_s = look / 2
            patient.heartbeat = Beats(max(beat_s for beat_s in beats_s if beat_s <= now_s))
            await liveness.beat()
            silent += [now_s - 2 * longest_s] * (liveness.silent_s > 0 and now_s > 2 * longest_s)
            unready += [now_s - 2 * longest_s] * (liveness.unready_s > 0)
        return silent[0], unready[0]

    silent_s, unready_s = asyncio.run(watch())
    allowed_s = max(2.0, 2 * (longest_s - 0.5))
    assert 0 < silent_s - allowed_s <= 0.5
    assert 0 < unready_s - 3 * allowed_s <= 0.5


def test_one_that_loads_its_model_is_not_silent(patient: Patient) -> None:
    assert told_at(patient, [0.0, 50.0], [None, None]) == [0, 0]


def test_one_that_was_stopped_is_told_as_silent_as_soon_as_that_is_known(patient: Patient) -> None:
    os.kill(patient.pid, signal.SIGSTOP)
    os.waitpid(patient.pid, os.WUNTRACED)
    assert told_at(patient, [0.0, 0.5, 1.0, 1.5, 2.5], [0.0] * 5) == [0, 0, 1, 1, 2]
