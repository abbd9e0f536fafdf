"""A loop's heartbeat as another process sees it."""

from __future__ import annotations

import subprocess
import sys

from diptych.common.heartbeat import new_heartbeat

CHILD = """
import sys
from diptych.common.heartbeat import SharedHeartbeat
SharedHeartbeat(int(sys.argv[1])).beat(12.5)
"""


def test_a_beat_of_a_child_is_seen_after_the_descriptor_is_closed() -> None:
    with new_heartbeat() as (heartbeat, descriptor):
        child = subprocess.Popen((sys.executable, "-c", CHILD, str(descriptor)), pass_fds=(descriptor,))
    assert heartbeat.last_s is None or heartbeat.last_s == 12.5
    assert child.wait(60) == 0
    assert heartbeat.last_s == 12.5
