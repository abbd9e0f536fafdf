"""Which pages of layers with a window are live: the others are behind it, for every token that is still to come. Pure.

Layers that see all tokens share a page of the KV pool, and layers with a window share others, in groups: see
`ModelConfig.page_groups`. So a page of tokens is one of the pool's for the former, and while it is live one more for
each group of the latter. A prompt gets those as it is computed, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The windows of a model, as one: all layers with a window keep what the largest of theirs sees."""

    num_groups: int  # of layers with a window
    window: int = 0  # tokens that such a layer sees at most, the newest
    is_chunked: bool = False  # windows don't slide: they cut a text into chunks
    step_tokens: int = 1 << 30  # of a prompt that a step computes at most

    def live_from(self, num_tokens: int) -> int:
        """Return the first token that those behind the first `num_tokens` see."""
        if self.is_chunked:
            return num_tokens // self.window * self.window
        return max(0, num_tokens - self.window + 1)

    def last_boundary(self, num_tokens: int) -> int:
        """Return behind how many of the first `num_tokens`, at most, no token is live: none where windows slide."""
        return num_tokens // self.window * self.window if self.is_chunked else 0

    def first_live(self, num_tokens: int, page_size: int) -> int:
        """Return the first live page of a text that goes on behind so many tokens, or behind their last whole page.

        With what is live there, others can go on as well: only whole pages are shared.
        """
        return self.live_from(num_tokens // page_size * page_size) // page_size

    def fewest_passed(self, page_size: int) -> int:
        """Return with how many whole pages, from one that was the first live page on, that one may be live no more.

        It is no more where windows slide, and where they are whole pages; else it may still be.
        """
        return max(1, self.window // page_size) if self.is_chunked else 1 - (1 - self.window) // page_size

    def num_live(self, num_tokens: int, page_size: int) -> int:
        """Return how many pages of a text of so many tokens are live, in all groups."""
        return self.num_groups * (-(-num_tokens // page_size) - self.first_live(num_tokens, page_size))

    def most_live(self, page_size: int) -> int:
        """Return how many pages of a text are live at most while it grows by single tokens, in all groups."""
        return self.num_groups * self._most_live(page_size)

    def most_computed(self, page_size: int) -> int:
        """Return how many pages of each group a prompt holds at most: what is live, and those of a step."""
        return self._most_live(page_size) - (-self.step_tokens // page_size)

    def pool_pages(self, num_pages: int, page_size: int) -> int:
        """Return how many pages of the pool a text of so many pages takes at most while it is computed."""
        return num_pages + self.num_groups * min(num_pages, self._most_held(page_size))

    def fitting(self, pool_pages: int, page_size: int) -> int:
        """Return the pages of the longest text that so many pages of the pool are enough for."""
        if pool_pages // (1 + self.num_groups) < self._most_held(page_size):
            return pool_pages // (1 + self.num_groups)
        return pool_pages - self.num_groups * self._most_held(page_size)

    def _most_live(self, page_size: int) -> int:
        return 2 - (-self.window // page_size)

    def _most_held(self, page_size: int) -> int:
        """Pages of a group: of a step, and before it what is live, of which some may have been passed."""
        return self._most_live(page_size) + 1 + self.most_computed(page_size)


NO_WINDOWS: Final = WindowPages(0)
