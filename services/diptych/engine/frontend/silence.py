"""How long a step loop has been silent, by its beats. Pure: it is told the time.

A loop beats when it comes round, hence not while a step runs, and a long step is no silence. Nobody knows how long one
may take before some have been seen: so it may take twice the longest round of the last hour, and 2 s in any case. The
first long step is called silence from its third second on, which costs little: routers prefer others meanwhile.
Readiness waits for `READY_MARGIN` times as long, because a rollout stops and a disruption budget is used up by it.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 2.0  # at least: an idle loop beats each 0.5 s
MARGIN: Final = 2.0  # times the longest round
READY_MARGIN: Final = 3.0  # times what a step may take: silence that makes a worker unready
MEMORY_S: Final = 3600.0  # for which a round counts, at least; at most twice that


class Silence:
    """Looks at the beats of one loop now and then; no round is judged better than the looks are apart."""

    def __init__(self) -> None:
        self._beat_s: float | None = None  # as it was at the last look
        self._looked_s = 0.0
        self._longest_s = 0.0  # round that was seen to end, since `_since_s`
        self._before_s = 0.0  # and in the `MEMORY_S` before
        self._since_s = 0.0

    def look(self, beat_s: float | None, now_s: float) -> float:
        """Return for how long the loop has been silent; 0: no longer than a step may take.

        `beat_s`: when it last came round; None: it has not begun, which is no silence.
        """
        if now_s - self._since_s > MEMORY_S:
            self._before_s = self._longest_s if now_s - self._since_s <= 2 * MEMORY_S else 0.0
            self._longest_s, self._since_s = 0.0, now_s
        if self._beat_s is not None and beat_s != self._beat_s:
            self._longest_s = max(self._longest_s, self._looked_s - self._beat_s)
        self._beat_s, self._looked_s = beat_s, now_s
        age_s = 0.0 if beat_s is None else now_s - beat_s
        return age_s if age_s > self.allowed_s else 0.0

    @property
    def allowed_s(self) -> float:
        """How long a step may take."""
        return max(PATIENCE_S, MARGIN * max(self._longest_s, self._before_s))


def silence_words(silent_s: int) -> str:
    return f"the scheduler has been silent for {silent_s} s"
