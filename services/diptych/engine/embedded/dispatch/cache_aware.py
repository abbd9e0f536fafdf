"""Chooses the group that computes the request's first token soonest, in tokens of work.

What a group must compute before: the prompts that wait there and what its prefix cache lacks of this one; and each open
request takes a little of every step. So a cached prefix draws requests until the queue behind it costs more than it
saves. What the caches hold is guessed from the prompts that were given to each group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from diptych.engine.embedded.dispatch.policy import GroupView, RequestView
from diptych.engine.embedded.dispatch.prefix_index import PrefixIndex
from diptych.generation.page_hash import page_hashes

OPEN_TOKENS: Final = 16  # prompt tokens that are as much work as one open request


class CacheAware:
    """Implements `DispatchPolicy`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._indexes: dict[int, PrefixIndex] = defaultdict(PrefixIndex)

    def choose(self, groups: Sequence[GroupView], request: RequestView) -> int:
        prompt = np.array(request.prompt, dtype=np.int64)
        hashes = page_hashes(prompt, self._page_size, request.extra_key).tolist()
        chosen = min(groups, key=lambda group: (self._work(group, hashes), group.num_open, group.rank)).rank
        self._indexes[chosen].insert(hashes)
        return chosen

    def _work(self, group: GroupView, hashes: Sequence[int]) -> int:
        """The same prompt for every group: only what is cached of it makes a difference."""
        cached = self._indexes[group.rank].match(hashes) * self._page_size
        return group.waiting_tokens + group.num_open * OPEN_TOKENS - cached
