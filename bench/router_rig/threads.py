"""What the kernel gave each thread of some processes: processor time, and how often it had to be woken up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

MAIN: Final = "main"
TICKS_A_SECOND: Final = 100.0
Key = TypeVar("Key")


class Thread(NamedTuple):
    """Threads of one name, of one process."""

    process: int  # its number among those that are looked at
    name: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts up to a moment, or of a span of time."""

    at_s: float  # or how long it took
    cpu_s: Mapping[Thread, float] = field(default_factory=dict)
    waits: Mapping[Thread, float] = field(default_factory=dict)  # times that a thread gave its processor up
    kernel_s: Mapping[int, float] = field(default_factory=dict)  # by process, to a hundredth of a second

    def since(self, before: Reading) -> Reading:
        return Reading(
            self.at_s - before.at_s,
            _less(self.cpu_s, before.cpu_s),
            _less(self.waits, before.waits),
            _less(self.kernel_s, before.kernel_s),
        )

    @property
    def share(self) -> float:
        """All processor time, as a part of a core."""
        return sum(self.cpu_s.values()) / self.at_s


def read(pids: Sequence[int]) -> Reading:
    """Return the counts of these processes; those that are gone have none."""
    cpu_s: defaultdict[Thread, float] = defaultdict(float)
    waits: defaultdict[Thread, float] = defaultdict(float)
    kernel_s = {}
    at_s = time.monotonic()
    for process, pid in enumerate(pids):
        for folder in _threads(pid):
            with suppress(OSError):  # it has just ended
                thread = Thread(process, MAIN if folder.name == str(pid) else (folder / "comm").read_text().strip())
                cpu_s[thread] += int((folder / "schedstat").read_text().split()[0]) / 1e9
                waits[thread] += _waits(folder / "status")
        with suppress(OSError):
            kernel_s[process] = (
                int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[12]) / TICKS_A_SECOND
            )
    return Reading(at_s, dict(cpu_s), dict(waits), kernel_s)


def _threads(pid: int) -> Iterator[Path]:
    with suppress(OSError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def _waits(status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
    return int(line.split()[1])


def _less(now: Mapping[Key, float], before: Mapping[Key, float]) -> Mapping[Key, float]:
    return {key: value - before.get(key, 0) for key, value in now.items()}
