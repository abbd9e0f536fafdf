"""What the two roles of a worker leave each other of its cache, and how long a request may be so. Pure."""

from __future__ import annotations

from diptych.common.members.roles import Role
from diptych.decode.grants import Headroom
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.limits import PROMPT_ROWS
from diptych.prefill.core import PrefillCore


class Reserve:
    """What one worker keeps free of its cache: pages for prompts while it serves them beside outputs, and always a row.

    The row is one that the cache has beside those of `Limits.max_requests`, so as many can run.
    """

    def __init__(self, cache: KvCache, prefill: PrefillCore) -> None:
        self._cache = cache
        self._prefill = prefill
        self._whole = Headroom(rows=PROMPT_ROWS)  # while prompts hold nothing

    def keep(self, num_tokens: int) -> None:
        """Keep pages enough for a prompt of so many tokens; 0: none."""
        pages = self._cache.pages_for_prompt(num_tokens) if num_tokens else 0
        self._whole = Headroom(pages, PROMPT_ROWS)

    def headroom(self) -> Headroom:
        """Return what new rooms of the decode core must leave."""
        if not self._prefill.by_room:
            return self._whole
        prompts = self._prefill.admitted_prompts()
        num_held = sum(len(self._cache.owned_pages(request)) for request in prompts)
        return Headroom(max(0, self._whole.pages - num_held), 0 if prompts else PROMPT_ROWS)


def max_tokens(role: Role, context_len: int, cache: KvCache) -> int:
    """Return what a request may have at most, prompt and output, in a role."""
    fitting = min(context_len, cache.max_request_tokens)
    if role is not Role.UNIFIED:
        return fitting
    reserve, granted = cache.pages_for_prompt(0), cache.pages_per_state
    of_each = max(0, (cache.pool.capacity - reserve - granted) // 2)
    return min(fitting, cache.windows.fitting(of_each, cache.page_size) * cache.page_size)
