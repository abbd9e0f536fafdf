"""Decides when a process that we started must be ended. Pure: what is seen of it in, why it must end out.

It must end if its event loop does not come round, or if it took too much memory. `Watch` is shown the process every
`LOOK_S`. It counts silence from the moment a heartbeat is due, and only time that speaks against the process:

- not before its loop came round once, nor after the loop ended, nor while a debugger holds it;
- between two looks, no more than `LOOK_S`: a watcher that was late was starved, stopped or asleep itself, and so may
  the process have been;
- while a thread of the process wants a processor, no more than the processor time that the process got. A process that
  hangs and computes gets all there is; on a busy machine it takes longer to tell a hang from a slow step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.common.members.heartbeat import BEAT_S

LOOK_S: Final = 0.25
ROUTER_PATIENCE_S: Final = 2.0  # nobody but the router can answer who has asked it
PATIENCE_S: Final = 60.0  # where others notice sooner, and a restart is no hurry


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a process may do without being ended."""

    patience_s: float = PATIENCE_S  # that its loop may be silent, from when a heartbeat was due
    memory_bytes: int = 0  # limit of its own memory, with its children; 0: none


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What is seen of a process at one look."""

    now_s: float
    beat_s: float | None  # when its loop last came round; None: it has not begun, or has ended
    cpu_s: float = 0.0  # processor time that its threads have had
    wants_cpu: bool = False  # some thread runs, or would
    is_traced: bool = False  # a debugger holds it
    memory_bytes: int = 0


class Watch:
    """Judges one process, from its start to its end."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._last: ProcessSample | None = None
        self._silent_s = 0.0

    def look(self, sample: ProcessSample) -> str:
        """Return why the process must be ended; empty: it may go on."""
        self._silent_s = self._silence(sample)
        self._last = sample
        if self._silent_s > self._bounds.patience_s + BEAT_S:
            return f"it froze: its event loop has not come round for {self._silent_s:.1f} s"
        if 0 < self._bounds.memory_bytes < sample.memory_bytes:
            return f"it reached its memory limit of {_mib(self._bounds.memory_bytes)} with {_mib(sample.memory_bytes)}"
        return ""

    def _silence(self, sample: ProcessSample) -> float:
        last = self._last
        if last is None or sample.beat_s is None or sample.beat_s != last.beat_s or sample.is_traced:
            return 0.0
        passed_s = min(sample.now_s - last.now_s, LOOK_S)
        return self._silent_s + (min(passed_s, sample.cpu_s - last.cpu_s) if sample.wants_cpu else passed_s)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
