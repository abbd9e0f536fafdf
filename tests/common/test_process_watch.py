"""What is seen of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from diptych.common.members.heartbeat import new_heartbeat
from diptych.common.proc import own_memory
from diptych.common.process_watch import look_at
from diptych.common.verdicts.watch import ProcessSample

pytestmark = pytest.mark.integration

MIB = 2**20
MEMORY = "held = bytearray(b'x' * (64 << 20)); print(flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MEMORY!r}])"
SPIN = "print(flush=True)\nwhile True: pass"

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program; it has said something, so it is where the test wants it."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str) -> subprocess.Popen[str]:
        command = (sys.executable, "-c", program)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in [each for each in started if each.poll() is None]:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.communicate()


def see(pid: int) -> ProcessSample:
    """One that has not beaten for as long as this machine runs."""
    with new_heartbeat() as (heartbeat, _):
        heartbeat.beat(1e-9)
        return look_at(pid, heartbeat, counts_memory=True)


def test_memory_is_that_of_a_process_and_of_what_it_has_started(start: Start) -> None:
    assert 64 * MIB <= own_memory(start(MEMORY).pid) < 128 * MIB
    assert 64 * MIB <= own_memory(start(PARENT).pid) < 128 * MIB


def test_who_computes_wants_a_processor_and_who_waits_or_is_stopped_does_not(start: Start) -> None:
    spinning, waiting = start(SPIN), start(MEMORY)
    assert see(spinning.pid).wants_cpu
    psutil_wait(waiting.pid, psutil.STATUS_SLEEPING)
    assert not see(waiting.pid).wants_cpu
    os.kill(spinning.pid, signal.SIGSTOP)
    psutil_wait(spinning.pid, psutil.STATUS_STOPPED)
    assert not see(spinning.pid).wants_cpu


def psutil_wait(pid: int, status: str) -> None:
    process = psutil.Process(pid)
    while process.status() != status:
        os.sched_yield()


def test_of_a_process_that_is_gone_nothing_is_seen(start: Start) -> None:
    process = start(MEMORY)
    process.communicate("\n")
    sample = see(process.pid)
    assert (sample.cpu_s, sample.wants_cpu, sample.is_traced, sample.memory_bytes) == (0.0, False, False, 0)
