"""The running batch: requests that get tokens in each step, and who makes room when memory runs out.

A request takes its next page only when it needs it. When there is none, the request of the lowest priority that would
lose the least progress is retracted.
"""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.request import Request


class DecodeBatch:
    """Requests whose KV is computed, or about to be, but for their last token."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._running: dict[int, Request] = {}  # by room, oldest first

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._running.values())

    def __contains__(self, request: Request) -> bool:
        return self._running.get(request.room) is request

    def add(self, request: Request) -> None:
        self._running[request.room] = request

    def remove(self, request: Request) -> None:
        """Take out a request. Its pages stay with the caller."""
        del self._running[request.room]

    def due(self) -> list[Request]:
        """Return those whose next token a step can compute: all but those that end with a token on its way."""
        return [request for request in self._running.values() if request.computed_len + 1 < request.max_len]

    def make_room(self, requests: list[Request]) -> bool:
        """Give every request a slot for its newest token; False, and nothing changed, when there are too few pages."""
        page_size = self._cache.page_size
        return self._cache.grow_each([r for r in requests if r.computed_len >= r.num_pages * page_size])

    def take_drafts(self, request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return as many of the drafts as may stand behind the request's newest token, which gets slots for them.

        It gets none where its choice depends on more than the logits, or where pages are missing: nobody is retracted
        for a guess.
        """
        if not request.samples_plainly:
            return ()
        kept = drafts[: request.max_len - request.num_tokens - 1]
        return kept if self._cache.grow(request, request.num_tokens + len(kept)) else ()

    def victim(self) -> Request:
        """Return whom to retract; at least one runs."""
        return min(self._running.values(), key=lambda request: (request.account.priority, request.num_output_tokens))
