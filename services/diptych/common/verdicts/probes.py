"""Decides how a component answers probes of its health. Pure: facts in, verdicts out.

*Live* is about this process alone: restarting it would help. Neither peers nor load count. *Ready* means that work sent
here now would be served. *Started* means that loading is over, however long it took.

`Watch` decides when a process that we started must be ended: its event loop does not come round, or it took too much
memory. It is shown the process every `LOOK_S`. It counts silence from the moment a heartbeat is due, and only time
that speaks against the process:

- not before its loop came round once, nor after the loop ended, nor while a debugger holds it;
- between two looks, no more than `LOOK_S`: a watcher that was late was starved, stopped or asleep itself, and so may
  the process have been;
- while a thread of the process wants a processor, no more than the processor time that the process got. A process that
  hangs and computes gets all there is; on a busy machine it takes longer to tell a hang from a slow step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

BEAT_S: Final = 0.5  # a loop that has nothing to do beats so often
LOOK_S: Final = 0.25
ROUTER_PATIENCE_S: Final = 2.0  # nobody but the router can answer who has asked it
PATIENCE_S: Final = 60.0  # where others notice sooner, and a restart is no hurry


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, and why, in words."""

    is_good: bool
    reason: str


Probe = Callable[[], Verdict]


@dataclass(frozen=True, slots=True)
class Probes:
    """What may be asked, from any thread and at any time."""

    live: Probe
    ready: Probe
    startup: Probe
    answers: Probe | None = None  # a router's: whether no other router would answer better

    def by_name(self) -> Mapping[str, Probe]:
        always = {"live": self.live, "ready": self.ready, "startup": self.startup}
        return {**always, "answers": self.answers} if self.answers else always


def judge_loops(silent_s: Mapping[str, float], stall_s: float) -> Verdict:
    """Judge loops by the time since each last came round; one that waits comes round every second."""
    stalled = [f"{name} has not come round for {since:.1f} s" for name, since in silent_s.items() if since > stall_s]
    return Verdict(not stalled, "; ".join(stalled) or "every loop runs")


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
