"""Names a process beyond doubt, and tells whether it is gone.

A pid alone can be used again, so the start time belongs to the name; and it means something only inside its pid
namespace, so a process of another container is never called gone merely because we can't see it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of some host."""

    host: str  # its kernel's boot id
    pid_namespace: str
    pid: int
    start_ticks: int  # after boot


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    stat = _read_stat(PROC / "self")
    assert stat is not None
    host = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ProcessIdentity(host, os.readlink(PROC / "self/ns/pid"), os.getpid(), stat[1])


def is_visible(process: ProcessIdentity) -> bool:
    """Whether this process could be seen from here if it lived: same kernel, same pid namespace."""
    own = own_identity()
    return (process.host, process.pid_namespace) == (own.host, own.pid_namespace)


def is_gone(process: ProcessIdentity) -> bool:
    """Whether a visible process can't run any code any more. A zombie can't, once all of its threads are dead."""
    folder = PROC / str(process.pid)
    stat = _read_stat(folder)
    if stat is None or stat[1] != process.start_ticks:
        return True
    return all(_is_dead(thread) for thread in _threads(folder))


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and waits to be continued."""
    stat = _read_stat(PROC / str(pid))
    return stat is not None and stat[0] == "T"


def _threads(folder: Path) -> list[Path]:
    try:
        return list((folder / "task").iterdir())
    except FileNotFoundError:
        return []


def _is_dead(thread: Path) -> bool:
    stat = _read_stat(thread)
    return stat is None or stat[0] in "ZX"


def _read_stat(folder: Path) -> tuple[str, int] | None:
    """State and start time of a process or thread, None when there is none."""
    try:
        text = (folder / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])
