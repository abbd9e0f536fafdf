"""Finds which of many keys is due next. Postponing an alarm, as a heartbeat does, needs no search."""

from __future__ import annotations

import heapq


class Alarms:
    """One alarm a key. A key's place in the heap is put right when it comes to the top, not when its alarm moves."""

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._placed_s: dict[int, float] = {}  # the entry of the heap that stands for a key; never after its alarm
        self._heap: list[tuple[float, int]] = []

    def __contains__(self, key: int) -> bool:
        return key in self._at_s

    def set(self, key: int, at_s: float) -> None:
        self._at_s[key] = at_s
        if key not in self._placed_s or at_s < self._placed_s[key]:
            self._place(key, at_s)

    def drop(self, key: int) -> None:
        """Forget an alarm, if there is one."""
        self._at_s.pop(key, None)

    @property
    def next_s(self) -> float | None:
        """When the next alarm is due; None: there is none."""
        self._tidy()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> list[int]:
        """Return, once, the keys whose alarm is due, the earliest first."""
        due = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            due.append(self._heap[0][1])
            self.drop(due[-1])
        return due

    def _tidy(self) -> None:
        """Bring an entry to the top that is its key's alarm."""
        while self._heap:
            placed_s, key = self._heap[0]
            stands = self._placed_s.get(key) == placed_s
            if stands and self._at_s.get(key) == placed_s:
                return
            heapq.heappop(self._heap)
            if stands:
                del self._placed_s[key]
                if key in self._at_s:
                    self._place(key, self._at_s[key])

    def _place(self, key: int, at_s: float) -> None:
        self._placed_s[key] = at_s
        heapq.heappush(self._heap, (at_s, key))
