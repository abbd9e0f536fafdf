"""Observes a process that we started, and reports when it must be ended.

It is observed by its heartbeats and by Linux' `/proc`; where there is no `/proc`, by its heartbeats alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from diptych.common.members.heartbeat import SharedHeartbeat
from diptych.common.verdicts.probes import BEAT_S, LOOK_S, Bounds, ProcessSample, Watch

_OWN_MEMORY: Final = ("RssAnon", "VmSwap")  # not that of files, which the system can drop
_ENDED: Final = ("Z", "X")  # nobody has asked yet how
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
    cpu_s = _cpu_s(_stat(Path(f"/proc/{pid}/stat")))
    if beat_s is None or now_s - beat_s < BEAT_S:
        return ProcessSample(now_s, beat_s, cpu_s, memory_bytes=memory_bytes)
    threads = [_stat(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return ProcessSample(
        now_s,
        beat_s,
        cpu_s,
        wants_cpu=any(fields and fields[0] in _WANT_CPU for fields in threads),
        is_traced=_status(pid).get("TracerPid", 0) > 0,
        memory_bytes=memory_bytes,
    )


def started_at(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None: it has ended, or there is no `/proc`.

    Two processes may have one id, but not with the same start.
    """
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return int(fields[19]) if fields and fields[0] not in _ENDED else None


def own_memory(pid: int) -> int:
    """Return the bytes that a process and all below it hold and nobody could take from them; 0: it is gone."""
    return sum(_status(each).get(name, 0) * 1024 for each in with_children(pid) for name in _OWN_MEMORY)


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container that this process is in."""
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(everything, int(limit)) if limit.isdigit() else everything


def with_children(pid: int) -> Iterator[int]:
    """Yield the ids of a process and of all below it."""
    yield pid
    for child in _read(Path(f"/proc/{pid}/task/{pid}/children")).split():  # those that the main thread started
        yield from with_children(int(child))


def _status(pid: int) -> dict[str, int]:
    """The numbers of `/proc/PID/status`, by name."""
    lines = (line.split() for line in _read(Path(f"/proc/{pid}/status")).splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _stat(path: Path) -> list[str]:
    """The fields behind the name, which may hold anything: the first is the state."""
    return _read(path).rpartition(")")[2].split()


def _cpu_s(fields: list[str]) -> float:
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
