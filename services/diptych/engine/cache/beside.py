"""What the pages of a model can have beside them, and what of that others need to go on behind a text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.engine.cache.page_ids import FIRST_STATE_PART, FIRST_WINDOW, PageId
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages


@dataclass(frozen=True, slots=True)
class Beside:
    """Pages of layers with a window, and states. An *end* is what of them is needed behind a text."""

    windows: WindowPages
    pages_per_state: int
    page_size: int

    @property
    def is_nothing(self) -> bool:
        return not (self.windows.num_groups or self.pages_per_state)

    @property
    def most_places(self) -> int:
        """Pages of the largest end."""
        return self.windows.num_groups * -(-self.windows.window // self.page_size) + self.pages_per_state

    def first(self, end: int) -> int:
        """Return the first page of a text that is needed in layers with a window behind its first `end` pages."""
        return self.windows.first_live(end * self.page_size, self.page_size) if self.windows.num_groups else end

    def is_needed(self, end: int) -> bool:
        """Whether others need more than the tokens' pages to go on there: not where a window begins anew."""
        return bool(self.pages_per_state) or self.first(end) < end

    def last(self, page: PageId) -> PageId:
        """Return the last page of the end behind `page`: a part of a state, or one of the last group of windows."""
        last_window, last_part = FIRST_WINDOW + self.windows.num_groups - 1, FIRST_STATE_PART + self.pages_per_state - 1
        return page._replace(group=last_part if self.pages_per_state else last_window)

    def ids(self, live: Sequence[PageId], last: PageId) -> list[PageId]:
        """Return all pages of the end behind the page `last`; `live`: the pages of tokens from the first needed one."""
        windows = [
            page._replace(group=FIRST_WINDOW + group) for page in live for group in range(self.windows.num_groups)
        ]
        return [*windows, *(last._replace(group=FIRST_STATE_PART + part) for part in range(self.pages_per_state))]


NOTHING_BESIDE: Final = Beside(NO_WINDOWS, 0, 1)
