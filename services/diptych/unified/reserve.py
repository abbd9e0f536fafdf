"""What a unified worker keeps free for prompts that it computes for others, so that no workers wait for each other.

A room holds pages here for another worker's sake only while they are granted and not handed off (IMPORTING). Everything
else that holds pages comes to its end by itself: a request that decodes goes on or is retracted, a prompt that has its
pages is computed and sent into pages that are granted already, a quarantine ends with a note that needs no memory.

Rule: new grants and new local requests leave as many pages as the largest request may have, less those that prefill has
now, and a row of the page table. So when all that ends by itself has ended, granted pages are at most the pool without
the reserve, and whichever prompt is next fits: it is computed, its pages at the other worker stop being IMPORTING, and
so with every room. For the rest of the pool to take such a request too, one may have half of the pool at most.
"""

from __future__ import annotations

from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.decode.grants import Spare
from diptych.engine.cache.kv_cache import KvCache
from diptych.prefill.core import PrefillCore

_NOTHING = Spare()


class Reserve:
    """Of one worker. Nothing is kept until `keep`."""

    def __init__(self, cache: KvCache, prefill: PrefillCore) -> None:
        self._cache = cache
        self._prefill = prefill
        self._whole = _NOTHING  # while prompts hold nothing

    def keep(self, num_tokens: int) -> None:
        """Keep enough for a prompt of so many tokens; 0: nothing."""
        self._whole = Spare(self._cache.pages_for(num_tokens), 1) if num_tokens else _NOTHING

    def spare(self) -> Spare:
        """Return what new rooms of the decode core must leave."""
        if self._whole is _NOTHING or not self._prefill.num_open_rooms:
            return self._whole
        prompts = self._prefill.holders().owning
        num_held = sum(len(self._cache.owned_pages(request)) for request in prompts)
        return Spare(max(0, self._whole.pages - num_held), 0 if prompts else 1)


def max_tokens(role: Role, context_len: int, cache: KvCache) -> int:
    """Return what a request may have at most, prompt and output, in a role. Raises `ConfigError`."""
    fitting = min(context_len, cache.max_request_tokens)
    if role is not Role.UNIFIED:
        return fitting
    if cache.num_rows < 2:
        raise ConfigError("a unified worker needs --max-requests 2 at least: one to decode, one to prefill")
    return min(fitting, cache.pool.capacity // 2 * cache.page_size)
