"""When requests must have ended, the earliest first. Asking costs nothing while none is due."""

from __future__ import annotations

import heapq
import math
from typing import Final

from diptych.engine.values.request import Request

MIN_COMPACTED: Final = 256


class Deadlines:
    """Deadlines of requests that have not ended. Those that have are forgotten from time to time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._compact_at = MIN_COMPACTED

    def add(self, request: Request) -> None:
        if request.life.deadline_s < math.inf:
            if len(self._heap) >= self._compact_at:
                self._compact()
            self._num_added += 1
            heapq.heappush(self._heap, (request.life.deadline_s, self._num_added, request))

    def due(self, now_s: float) -> list[Request]:
        """Return, once, the requests whose deadline has passed."""
        due: list[Request] = []
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].has_ended):
            request = heapq.heappop(self._heap)[2]
            if not request.has_ended:
                due.append(request)
        return due

    def __len__(self) -> int:
        """How many deadlines are kept, of requests that have ended too: at most twice as many as have not."""
        return len(self._heap)

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if not entry[2].has_ended]
        heapq.heapify(self._heap)
        self._compact_at = max(MIN_COMPACTED, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """Return the earliest deadline, or that of a request that has ended; None when there is none."""
        return self._heap[0][0] if self._heap else None
