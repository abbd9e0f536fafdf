"""Requests whose prompt is not computed yet, and the choice of what the next extend step computes.

Who is admitted next is the waiting queue's choice; if that request does not fit the pool, nobody passes it, so none
starves. A prompt longer than what is left of the token budget is chunked, and its chunk ends the batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from diptych.engine.kv_cache import KvCache
from diptych.engine.request import Request
from diptych.engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt that one step computes: tokens `[request.computed_len, request.computed_len + num_tokens)`."""

    request: Request
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.request.extend_len

    @property
    def num_predicted(self) -> int:
        """Tokens of the prompt that this part predicts: each the next one, but the prompt's last."""
        start = self.request.computed_len
        return min(start + self.num_tokens, self.request.prompt_len - 1) - start


class ExtendQueue:
    """Waiting requests and the ones part-way through their prompt."""

    def __init__(self, cache: KvCache, waiting: WaitingQueue, *, max_step_tokens: int, max_batch_size: int) -> None:
        self._cache = cache
        self._waiting = waiting
        self._max_step_tokens = max_step_tokens
        self._max_batch_size = max_batch_size
        self._extending: deque[Request] = deque()  # admitted, prompt not complete

    def __len__(self) -> int:
        return len(self._waiting) + len(self._extending)

    @property
    def admitted(self) -> tuple[Request, ...]:
        return tuple(self._extending)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting.num_tokens + sum(request.extend_len for request in self._extending)

    def add(self, request: Request) -> None:
        self._waiting.add(request)

    def add_first(self, request: Request) -> None:
        """Queue a retracted request ahead of all that never ran."""
        self._waiting.add_first(request)

    def remove(self, request: Request) -> None:
        """Take out a request that ends early. Its pages stay with the caller."""
        (self._extending if request.row >= 0 else self._waiting).remove(request)

    def plan(self, now_s: float, *, spare_pages: int = 0) -> list[Chunk]:
        """Choose the next step's chunks, admitting requests while budget and pages last."""
        chunks: list[Chunk] = []
        budget = self._max_step_tokens
        for request in list(self._extending):
            budget -= self._add_chunk(chunks, request, budget)
        while budget > 0 and self._waiting and len(chunks) < self._max_batch_size:
            request = self._waiting.peek(now_s)
            if not self._cache.admit(request, spare_pages=spare_pages):
                break
            self._waiting.take(request)
            self._extending.append(request)
            budget -= self._add_chunk(chunks, request, budget)
        return chunks

    def commit(self, chunks: list[Chunk]) -> list[Request]:
        """Note that the chunks are computed; return the requests whose prompt is complete, which leave the queue."""
        complete = [chunk.request for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            chunk.request.computed_len += chunk.num_tokens
        for request in complete:
            self._extending.remove(request)
        return complete

    def _add_chunk(self, chunks: list[Chunk], request: Request, budget: int) -> int:
        num_tokens = min(request.extend_len, budget)
        if num_tokens > 0 and len(chunks) < self._max_batch_size:
            chunks.append(Chunk(request, num_tokens))
            return num_tokens
        return 0
