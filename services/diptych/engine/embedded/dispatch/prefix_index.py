"""Guesses which page hashes a group's prefix cache holds, from the prompts that were given to it.

Bounded. A hash covers the whole prefix up to its page, so a prefix is forgotten from its end: a page is never younger
than the one before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

MAX_PAGES: Final = 2**16


class PrefixIndex:
    """The page hashes of one group, the least recently used first."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many leading pages of a prompt are known."""
        return sum(1 for _ in takewhile(self._hashes.__contains__, hashes))

    def insert(self, hashes: Sequence[int]) -> None:
        for page_hash in reversed(hashes):
            self._hashes[page_hash] = None
            self._hashes.move_to_end(page_hash)
        while len(self._hashes) > self._max_pages:
            self._hashes.popitem(last=False)
