"""A loop's heartbeat as another process sees it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from diptych.common.members.heartbeat import DESCRIPTOR_VARIABLE, new_heartbeat

pytestmark = pytest.mark.integration

CHILD = """
import sys
from diptych.common.members.heartbeat import SharedHeartbeat
SharedHeartbeat(int(sys.argv[1])).beat(12.5)
"""


LOOP = """
import asyncio
from diptych.common.event_loop import run_until_signal

async def serve(stop):
    assert "DIPTYCH_HEARTBEAT_FD" not in os.environ, "what we start is not watched by who started us"
    print("serving", flush=True)
    await stop.wait()

import os
asyncio.run(run_until_signal(serve))
print("ended", flush=True)
input()
"""


def test_who_is_watched_beats_while_its_loop_runs_and_says_that_it_ended() -> None:
    with new_heartbeat() as (heartbeat, descriptor):
        child = subprocess.Popen(
            (sys.executable, "-c", LOOP),
            pass_fds=(descriptor,),
            env={**os.environ, DESCRIPTOR_VARIABLE: str(descriptor)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert child.stdout is not None
    assert child.stdout.readline() == "serving\n"
    while not (first_s := heartbeat.last_s):
        os.sched_yield()
    while heartbeat.last_s == first_s:
        os.sched_yield()
    child.terminate()
    assert child.stdout.readline() == "ended\n"
    assert heartbeat.last_s is None
    child.communicate("\n")


def test_a_beat_of_a_child_is_seen_after_the_descriptor_is_closed() -> None:
    with new_heartbeat() as (heartbeat, descriptor):
        child = subprocess.Popen((sys.executable, "-c", CHILD, str(descriptor)), pass_fds=(descriptor,))
    assert heartbeat.last_s is None or heartbeat.last_s == 12.5
    assert child.wait(60) == 0
    assert heartbeat.last_s == 12.5
