"""When requests must have ended, the earliest first. Asking costs nothing while none is due."""

from __future__ import annotations

import heapq

from diptych.engine.request import Request


class Deadlines:
    """Deadlines of requests that have not ended. Those that have are forgotten on the way."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        if request.deadline_s is not None:
            self._num_added += 1
            heapq.heappush(self._heap, (request.deadline_s, self._num_added, request))

    def due(self, now_s: float) -> list[Request]:
        """Return, once, the requests whose deadline has passed."""
        due: list[Request] = []
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].has_ended):
            request = heapq.heappop(self._heap)[2]
            if not request.has_ended:
                due.append(request)
        return due

    def next_s(self) -> float | None:
        """Return the earliest deadline, or that of a request that has ended; None when there is none."""
        return self._heap[0][0] if self._heap else None
