"""The running batch: requests that get one token a step, and who makes room when memory runs out.

A request takes its next page only when it needs it. When there is none, the request that would lose the least
progress is retracted: it leaves, and its pages become a cached prefix, the most recently used one. So if it is admitted
again before that memory is needed, or the memory went to the host tier, little of its KV is computed a second time.
What becomes of the request is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.kv_cache import KvCache
from diptych.engine.request import Request


class DecodeBatch:
    """Requests whose KV is complete but for their last token."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._running: dict[int, Request] = {}  # by room, oldest first

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._running.values())

    def add(self, request: Request) -> None:
        self._running[request.room] = request

    def remove(self, request: Request) -> None:
        """Take out a request. Its pages stay with the caller."""
        del self._running[request.room]

    def make_room(self) -> list[Request]:
        """Give every request a slot for its next token; return the retracted ones, which hold pages no more."""
        retracted: list[Request] = []
        for request in list(self._running.values()):
            while request.room in self._running and not self._cache.grow(request, request.num_tokens):
                victim = min(self._running.values(), key=lambda candidate: candidate.num_output_tokens)
                self.remove(victim)
                self._cache.retire(victim)
                retracted.append(victim)
        return retracted

    def commit(self) -> list[Request]:
        """Note that one step ran; return its requests in batch order."""
        requests = list(self._running.values())
        for request in requests:
            request.computed_len += 1
        return requests
