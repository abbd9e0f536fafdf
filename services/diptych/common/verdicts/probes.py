"""Decides how a component answers probes of its health. Pure: facts in, verdicts out.

*Live* is about this process alone: restarting it would help. Neither peers nor load count. *Ready* means that work sent
here now would be served. *Started* means that loading is over, however long it took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


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
