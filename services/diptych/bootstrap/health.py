"""The probes of a bootstrap replica: live while its event loop comes round, and ready as soon as it serves.

It does not wait to be complete: workers register again within a heartbeat, and meanwhile its watchers retain what it
had listed before. Its answer says how long it has been up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from diptych.common.health.probes import Probes, Verdict, judge_loops
from diptych.common.members.heartbeat import LoopHeartbeat

STALL_S: Final = 30.0  # nothing on the loop takes a fraction of that


class BootstrapHealth:
    """`heartbeat` must be running. Made when the replica serves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self.heartbeat = LoopHeartbeat(clock)
        self.probes = Probes(self._live, self._ready, lambda: Verdict(True, "started"))

    def _live(self) -> Verdict:
        return judge_loops({"the event loop": self._clock() - self.heartbeat.last_s}, STALL_S)

    def _ready(self) -> Verdict:
        return Verdict(True, f"serves, for {self._clock() - self._started_s:.0f} s")
