"""Reads of the machine's processes what Linux tells under `/proc`, as far as it is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN_MEMORY: Final = ("RssAnon", "VmSwap")  # not that of files, which the system can drop
_ENDED: Final = ("Z", "X")  # nobody has asked yet how


def started_at(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None: it has ended, or there is no `/proc`.

    Two processes may have one id, but not with the same start.
    """
    fields = stat(Path(f"/proc/{pid}/stat"))
    return int(fields[19]) if fields and fields[0] not in _ENDED else None


def own_memory(pid: int) -> int:
    """Return the bytes that a process and all below it hold and nobody could take from them; 0: it is gone."""
    return sum(status(each).get(name, 0) * 1024 for each in with_children(pid) for name in _OWN_MEMORY)


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


def status(pid: int) -> dict[str, int]:
    """The numbers of `/proc/PID/status`, by name."""
    lines = (line.split() for line in _read(Path(f"/proc/{pid}/status")).splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def stat(path: Path) -> list[str]:
    """The fields behind the name, which may hold anything: the first is the state."""
    return _read(path).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
