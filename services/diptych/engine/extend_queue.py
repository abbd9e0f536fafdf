"""Requests whose prompt is not computed yet, and the choice of what the next step computes of them.

Who is admitted next is the waiting queue's choice; if that request does not fit the pool, nobody passes it, so none
starves. A prompt longer than what is left of the token budget is chunked, and its chunk ends the step; so does one for
which the prompts that are completed before it would wait longer than it is worth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.packing import Packing
from diptych.engine.request import Request
from diptych.engine.step import Chunk
from diptych.engine.waiting_queue import WaitingQueue


class ExtendQueue:
    """Waiting requests and the ones part-way through their prompt."""

    def __init__(self, cache: KvCache, waiting: WaitingQueue, limits: Limits) -> None:
        self._cache = cache
        self._waiting = waiting
        self._max_batch_size = limits.max_requests
        self._cost = limits.prompt_cost
        self._extending: deque[Request] = deque()  # admitted, prompt not complete

    def __len__(self) -> int:
        return len(self._waiting) + len(self._extending)

    @property
    def admitted(self) -> tuple[Request, ...]:
        return tuple(self._extending)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting.num_tokens + sum(request.extend_len for request in self._extending)

    def add_admitted(self, request: Request) -> None:
        """Take a request that holds its pages already."""
        self._extending.append(request)

    def remove(self, request: Request) -> None:
        """Take out a request that ends early. Its pages stay with the caller."""
        (self._extending if request.row >= 0 else self._waiting).remove(request)

    def plan(self, now_s: float, budget: int, spare_pages: Callable[[Request], int]) -> list[Chunk]:
        """Choose chunks that cost at most `budget`, admitting requests while budget and pages last.

        `spare_pages(request)` are to stay available when `request` is admitted.
        """
        step = Packing(self._cost, budget, self._max_batch_size, len(self))
        for request in self._extending:
            if not step.takes(request, request.computed_len):
                return step.chunks
            step.add(request)
        while self._waiting and self._cache.has_row and step.has_room:
            request = self._waiting.peek(now_s)
            start = 0 if step.takes_any else self._cache.cached_len(request)
            if not step.takes(request, start):
                break
            if not self._cache.admit(request, spare_pages=spare_pages(request)):
                break
            self._waiting.take(request)
            self._extending.append(request)
            step.add(request)
        return step.chunks

    def launch(self, chunks: Iterable[Chunk]) -> list[Request]:
        """Note that a step computes the chunks; return the requests whose prompt is then complete, which leave."""
        complete = [chunk.request for chunk in chunks if chunk.is_last]
        for request in complete:
            self._extending.remove(request)
        return complete

    def recall(self, chunks: Iterable[Chunk]) -> None:
        """The step that was to compute the chunks did not: take back the requests that had left with it."""
        self._extending.extendleft(chunk.request for chunk in chunks if chunk.is_last)
