"""Observes a process that we started, and reports when it must be ended.

It is observed by its heartbeats and by Linux' `/proc`; where there is no `/proc`, by its heartbeats alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from diptych.common.members.heartbeat import BEAT_S, SharedHeartbeat
from diptych.common.proc import own_memory, stat, status
from diptych.common.verdicts.watch import LOOK_S, Bounds, ProcessSample, Watch

_WANT_CPU: Final = ("R", "D")  # D: it waits for a disk, as memory that was swapped out does


async def wait_until_out_of_bounds(
    pid: int, heartbeat: SharedHeartbeat, bounds: Bounds, *, is_judged: Callable[[], bool] = lambda: True
) -> str:
    """Return why a process must be ended, as soon as it must. Its silence does not count unless `is_judged`."""
    watch, counts_memory = Watch(bounds), bounds.memory_bytes > 0
    while True:
        sample = look_at(pid, heartbeat, counts_memory=counts_memory)
        if reason := watch.look(sample if is_judged() else replace(sample, beat_s=None)):
            return reason
        await asyncio.sleep(LOOK_S)


def look_at(pid: int, heartbeat: SharedHeartbeat, *, counts_memory: bool) -> ProcessSample:
    """Return what is seen now. What takes many files is read only of a process that misses a beat."""
    now_s, beat_s = time.monotonic(), heartbeat.last_s
    memory_bytes = own_memory(pid) if counts_memory else 0
    cpu_s = _cpu_s(stat(Path(f"/proc/{pid}/stat")))
    if beat_s is None or now_s - beat_s < BEAT_S:
        return ProcessSample(now_s, beat_s, cpu_s, memory_bytes=memory_bytes)
    threads = [stat(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return ProcessSample(
        now_s,
        beat_s,
        cpu_s,
        wants_cpu=any(fields and fields[0] in _WANT_CPU for fields in threads),
        is_traced=status(pid).get("TracerPid", 0) > 0,
        memory_bytes=memory_bytes,
    )


def _cpu_s(fields: list[str]) -> float:
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
